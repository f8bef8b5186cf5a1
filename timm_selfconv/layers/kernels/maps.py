"""Position-only attention by explicit maps, which all images share.

With ``A``, shape (Q heads, keys), the maps of all heads, a query's side by side, a layer is two products: ``A x`` and
its values. Its gradients are five. All are large and near the top speed even of matrix units (AMX), which the products
of `factors`, over the keys of a row, keep waiting. The batch is walked through in groups of images whose gathered
input, (B, Q, heads, C), stays in the cache; the backward pass gathers it again.
"""
from typing import List, Optional, Sequence, Tuple

import torch

from ..linear import linear, weight_gradient
from .kernel import Kernel, flush_denormals
from .operators import attend_by_maps

__all__ = ['attend', 'by_maps', 'gradients', 'maps_of_factors']

# bytes of what the heads of a group gather: on a CPU a share of the cache, elsewhere of the memory
CPU_BYTES = 16 * 2 ** 20
DEVICE_BYTES = 2 ** 30


def maps_of_factors(row_probs: torch.Tensor, col_probs: torch.Tensor) -> torch.Tensor:
    """``R_h (x) C_h`` of probabilities, shapes (heads, H, H) and (heads, W, W): shape (heads, H W, H W)."""
    return (row_probs[:, :, None, :, None] * col_probs[:, None, :, None, :]).flatten(3).flatten(1, 2)


def side_by_side(maps: torch.Tensor, x: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """Maps in x's dtype with a query's heads side by side, shape (Q heads, keys), and how many images make a group."""
    budget = CPU_BYTES if x.device.type == 'cpu' else DEVICE_BYTES
    rows = flush_denormals(maps, x.dtype).transpose(0, 1).flatten(0, 1)
    return rows, max(1, min(len(x), budget // max(1, len(rows) * x.shape[3] * x.element_size())))


def attend(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend with maps that all images share group by group, out of autograd's sight; see `attend_by_maps`."""
    queries, (out_channels, features) = maps.shape[1], weight.shape
    rows, images = side_by_side(maps, x)
    buffer = x.new_empty(images, len(rows), x.shape[3])
    out = x.new_empty(len(x), queries, out_channels)
    for group, result in zip(x.flatten(1, 2).split(images), out.split(images)):
        gathered = torch.bmm(rows.expand(len(group), -1, -1), group, out=buffer[:len(group)])
        result.view(-1, out_channels).copy_(linear(gathered.view(-1, features), weight, bias))
    return out


def gradients(
        grad: torch.Tensor,
        needs: Sequence[bool],
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> List[torch.Tensor]:
    """Gradients of :func:`attend`, nothing where not needed.

    Sums over groups are kept in float32 at least.

    Args:
        grad: Gradient of the result, shape (B, Q, out_channels).
        needs: Which arguments of :func:`attend` need theirs.
        maps: Probabilities, shape (heads, Q, H W), query before key.
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.
    """
    (heads, queries, _), (out_channels, features) = maps.shape, weight.shape
    rows, images = side_by_side(maps, x)
    by_key, pixels, values = rows.T.contiguous(), x.flatten(1, 2), weight.T.contiguous()
    sums = torch.promote_types(x.dtype, torch.float32)
    grad_rows, grad_weight = torch.zeros_like(rows, dtype=sums), torch.zeros_like(weight, dtype=sums)
    grad_x = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    buffer, weight_buffer = x.new_empty(images, len(rows), x.shape[3]), torch.empty_like(weight)
    # What the heads gather is made again, for the weight's gradient; its buffer then holds the gradient of it, from
    # which come that of the maps (by the input) and that of the input (by the maps, transposed once for all groups).
    for group, result, back in zip(pixels.split(images), grad_x.split(images), grad.split(images)):
        back = back.reshape(-1, out_channels)
        gathered = buffer[:len(group)]
        if needs[2]:
            torch.bmm(rows.expand(len(group), -1, -1), group, out=gathered)
            grad_weight += weight_gradient(back.T.contiguous(), gathered.view(-1, features), out=weight_buffer)
        if needs[0] or needs[1]:
            gathered = linear(back, values, out=gathered.view(-1, features)).view(gathered.shape)
        if needs[0]:
            grad_rows += (gathered @ group.transpose(1, 2)).sum(0, dtype=sums)
        if needs[1]:
            torch.bmm(by_key.expand(len(group), -1, -1), gathered, out=result)
    return [
        grad_rows.view(queries, heads, -1).transpose(0, 1).contiguous().to(maps.dtype) if needs[0] else x.new_empty(0),
        grad_x.view(x.shape) if needs[1] else x.new_empty(0),
        grad_weight.to(weight.dtype) if needs[2] else x.new_empty(0),
        grad.sum((0, 1)) if needs[3] else x.new_empty(0),
    ]


def empty(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Shapes and dtypes that :func:`attend` returns, for tracing."""
    return x.new_empty(x.shape[0], maps.shape[1], weight.shape[0])


by_maps = Kernel('maps', attend, gradients, attend_by_maps, empty)
