"""Attention whose probabilities are a product over the two axes: near the speed of its own matrix products.

With ``R_h`` over rows and ``C_h`` over columns a layer returns ``sum_h (R_h (x) C_h) x W_h``. Operator by operator that
writes and reads (B, H, W, heads, C) several times, which takes as long as the products themselves. Here the batch is
walked through in groups of images (or, of large ones, of heads) that stay in the cache:

    V_h = x W_h            values, one head after the other   (H, W, images, channels)
    U_h = R_h V_h          rows meet, side by side            (H, heads, W, images, channels)
    y   = sum_h C_h U_h    columns meet, heads are summed     (H, W, images, channels)

Images lie beside the channels, so that every product sees them as more of these and nothing is transposed in between.
The backward pass is the same walk with transposed factors, and gathers again what the other gradients need. Where whole
maps are faster (`maps`), they take the place of their factors.
"""
from math import prod
from typing import List, Optional, Sequence, Tuple

import torch

from ..linear import linear, weight_gradient
from .kernel import Kernel, flush_denormals
from .operators import attend_by_factors

__all__ = ['attend', 'by_factors', 'gradients', 'group_size', 'images_inside']

# bytes of what the heads of a group hold: on a CPU a share of the cache, elsewhere of the memory
CPU_BYTES = 8 * 2 ** 20
DEVICE_BYTES = 2 ** 30


def group_size(x: torch.Tensor, heads: int, channels: int) -> Tuple[int, int]:
    """Images and heads of a group that fits the cache; x as it comes, channels the most a pixel takes."""
    budget = CPU_BYTES if x.device.type == 'cpu' else DEVICE_BYTES
    fit = max(1, budget // max(1, x.shape[1] * x.shape[2] * channels * x.element_size()))
    return max(1, min(fit // heads, x.shape[0])), min(fit, heads)


def images_inside(x: torch.Tensor) -> torch.Tensor:
    """Images beside channels: (B, H, W, C) to (H W, B C)."""
    return x.permute(1, 2, 0, 3).reshape(x.shape[1] * x.shape[2], x.shape[0] * x.shape[3]).contiguous()


def attend(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend with row and column probabilities group by group, out of autograd's sight; see `attend_by_factors`."""
    heads, height, width = row_probs.shape[0], x.shape[1], x.shape[2]
    channels, out_channels = x.shape[3], weight.shape[0]
    images, step = group_size(x, heads, out_channels)
    rows, cols = flush_denormals(row_probs, x.dtype), flush_denormals(col_probs, x.dtype).transpose(0, 1)
    values = weight.unflatten(1, (heads, channels)).transpose(0, 1).contiguous()

    out = x.new_empty(x.shape[0], height, width, out_channels)
    numel = height * width * images * out_channels
    # Values first: a head's own product is as large as the input, where gathering first would hold all heads of it.
    # Rows meet head by head in one buffer with the heads side by side, so that one product over (heads, key columns)
    # both meets the columns and sums the heads, and nothing is added up by an operator of its own.
    value_buffer, row_buffer, sum_buffer = x.new_empty(numel), x.new_empty(step * numel), x.new_empty(numel)
    for first in range(0, x.shape[0], images):
        group = x[first:first + images]
        n = group.shape[0] * out_channels
        pixels = images_inside(group).view(-1, channels)
        value_out = value_buffer[:height * width * n].view(-1, out_channels)
        total = sum_buffer[:height * width * n].view(height, width, n)
        for head in range(0, heads, step):
            some = min(step, heads - head)
            met = row_buffer[:some * height * width * n].view(height, some, width * n)
            for i in range(some):
                value = linear(pixels, values[head + i], out=value_out)
                torch.mm(rows[head + i], value.view(height, -1), out=met[:, i])
            factor = cols[:, head:head + some].reshape(width, some * width).expand(height, -1, -1)
            torch.baddbmm(total, factor, met.view(height, some * width, n), beta=int(head > 0), out=total)
        total = total.view(height, width, -1, out_channels).permute(2, 0, 1, 3)
        if bias is None:
            out[first:first + images] = total
        else:
            torch.add(total, bias, out=out[first:first + images])
    return out


def gradients(
        grad: torch.Tensor,
        needs: Sequence[bool],
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> List[torch.Tensor]:
    """Gradients of :func:`attend`, nothing where not needed.

    Sums over groups are kept in float32 at least.

    Args:
        grad: Gradient of the result, shape (B, H, W, out_channels).
        needs: Which arguments of :func:`attend` need theirs.
        row_probs: Probabilities of key rows, shape (heads, H, H), query before key.
        col_probs: Probabilities of key columns, shape (heads, W, W).
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.
    """
    heads, height, width = row_probs.shape[0], x.shape[1], x.shape[2]
    channels, out_channels = x.shape[3], weight.shape[0]
    images, step = group_size(x, heads, channels)
    rows, cols = (flush_denormals(probs, x.dtype) for probs in (row_probs, col_probs))
    values = weight.unflatten(1, (heads, channels)).permute(1, 2, 0).contiguous()

    sums = torch.promote_types(x.dtype, torch.float32)
    grad_rows, grad_cols = torch.zeros_like(rows, dtype=sums), torch.zeros_like(cols, dtype=sums)
    grad_values = torch.zeros(heads, out_channels, channels, device=x.device, dtype=sums if needs[3] else x.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    numel = height * width * images * channels
    # The forward pass kept nothing but its inputs. Columns meet the input again, for several heads in one product; then
    # head by head what comes back through the values gives the gradient of rows, and meets them transposed; with rows
    # met too, the gathered input gives that of values. Transposed columns meet last and sum the heads, as forward.
    head_buffer, sum_buffer = x.new_empty(numel), x.new_empty(numel)
    row_buffer, col_buffer = x.new_empty(step * numel), x.new_empty(step * numel)
    weight_buffer = x.new_empty(out_channels, channels)
    for first in range(0, x.shape[0], images):
        group, grad_group = x[first:first + images], images_inside(grad[first:first + images]).view(-1, out_channels)
        grad_by_channel = grad_group.T.contiguous()
        n = group.shape[0] * channels
        pixels = images_inside(group).view(height, width, n)
        gathered = head_buffer[:pixels.numel()].view(height, width * n)
        total = sum_buffer[:pixels.numel()].view(height, width, n)
        for head in range(0, heads, step):
            some = min(step, heads - head)
            shape = (height, some * width, n)
            # columns have met: of the input, and with `by_row` rows of what comes back
            by_col = col_buffer[:prod(shape)].view(shape)
            by_row = row_buffer[:prod(shape)].view(shape)
            factor = cols[head:head + some].reshape(some * width, width)
            torch.bmm(factor.expand(height, -1, -1), pixels, out=by_col)
            for i in range(some):
                met, back = (b.view(height, some, width * n)[:, i] for b in (by_col, by_row))
                row = rows[head + i]
                grad_gathered = linear(grad_group, values[head + i], out=gathered.view(-1, channels)).view(height, -1)
                if needs[0]:
                    grad_rows[head + i] += (met @ grad_gathered.T).T
                torch.mm(row.T, grad_gathered, out=back)
                if needs[3]:
                    torch.mm(row, met, out=gathered)
                    gathered_pixels = gathered.view(-1, channels)
                    grad_values[head + i] += weight_gradient(grad_by_channel, gathered_pixels, out=weight_buffer)
            if needs[1]:
                grad_col = (by_row @ pixels.transpose(1, 2)).sum(0, dtype=sums)
                grad_cols[head:head + some] += grad_col.view(some, width, width)
            torch.baddbmm(total, factor.T.expand(height, -1, -1), by_row, beta=int(head > 0), out=total)
        grad_x[first:first + images] = total.view(height, width, -1, channels).permute(2, 0, 1, 3)
    return [
        grad_rows.to(row_probs.dtype) if needs[0] else x.new_empty(0),
        grad_cols.to(col_probs.dtype) if needs[1] else x.new_empty(0),
        grad_x if needs[2] else x.new_empty(0),
        grad_values.transpose(0, 1).flatten(1).to(weight.dtype) if needs[3] else x.new_empty(0),
        grad.sum((0, 1, 2)) if needs[4] else x.new_empty(0),
    ]


def empty(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Shapes and dtypes that :func:`attend` returns, for tracing."""
    return x.new_empty(*x.shape[:3], weight.shape[0])


by_factors = Kernel('factors', attend, gradients, attend_by_factors, empty)
