"""Position-only attention, ``sum_h A_h x W_h``: by row and column factors of the maps ``A_h``, or by the maps.

With ``A_h = R_h (x) C_h``, a group of images is multiplied by rows, then by columns. Images lie beside the
channels, (H, W, images channels), so that every product sees them as more of these, and nothing large is transposed:

    forward     V_h = x W_h, U_h = R_h V_h side by side, y = sum_h C_h U_h, one product over heads and key columns
    backward    M_h = R_h x, G_h = C_h M_h and their gradients, all heads at once

On small grids, CPUs that multiply bfloat16 are faster at two large products, ``A x`` with a query's heads side by side
and its values, than at short ones over the keys of a row. Where whole maps are asked for, of content too, their scores
come from here.
"""
import sys
from typing import Any, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

from .kernel import TINY, Kernel, kernel_dtype

__all__ = [
    'axis_probs', 'dense_scores', 'gather_by_factors', 'gather_by_maps', 'map_attention', 'map_keys', 'maps_of_factors',
    'separable_attention',
]

Gradients = Tuple[Optional[torch.Tensor], ...]


@torch.fx.wrap
@register_notrace_function
def dense_scores(
        query: Optional[torch.Tensor],
        key: Optional[torch.Tensor],
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        cross: Optional[torch.Tensor],
) -> torch.Tensor:
    """Scores A of equation (8) up to a constant per query, of what :meth:`SelfAttention2d.score_parts` gives.

    Returns:
        At least float32, shape (B or 1, heads, Q W, H W), query before key; without content the largest is 0.
    """
    scores: Optional[torch.Tensor] = None
    if rows is not None and cols is not None:
        # of one, the largest would swallow the other's, and half precision both
        rows, cols = rows - rows.detach().amax(-1, keepdim=True), cols - cols.detach().amax(-1, keepdim=True)
        scores = rows[..., :, None] + cols[..., None, :]
        if cross is not None:
            scores = scores + cross
            scores = scores - scores.detach().amax((-2, -1), keepdim=True)
        scores = scores.flatten(4).flatten(2, 3)
    if query is not None and key is not None:
        content = query.flatten(2, 3) @ key.transpose(-2, -1)
        content = content.to(torch.promote_types(content.dtype, torch.float32))
        scores = content if scores is None else content + scores
    assert scores is not None
    return scores


@torch.fx.wrap
@register_notrace_function
def axis_probs(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities of keys along one axis, shape (heads, queries, keys).

    A function of its own, because tools that look for whole maps in a graph look for `softmax`.
    """
    return scores.softmax(dim=-1)


@torch.fx.wrap
@register_notrace_function
def gather_by_factors(row_probs: torch.Tensor, col_probs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gather by row and column factors, ``(R_h (x) C_h) x`` for each head.

    ``softmax(a[k1] + b[k2])`` over all keys is ``softmax(a)[k1] softmax(b)[k2]`` when the keys fill a grid, borders
    included, so an H x W layer costs O(HW (H + W)) where the dense map costs O((HW)^2).

    Args:
        row_probs: Probabilities of key rows, shape (heads, Q1, H), query before key.
        col_probs: Probabilities of key columns, shape (heads, Q2, W).
        x: Input, shape (B, H, W, C).

    Returns:
        Shape (B, Q1, Q2, heads, C), of x's dtype.
    """
    gathered = torch.einsum('hik,bklc->bhilc', row_probs.to(x.dtype), x)
    return torch.einsum('hjl,bhilc->bijhc', col_probs.to(x.dtype), gathered)


def gather_by_maps(maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gather x, (B, H, W, C), by each head's map, (heads, Q, H W): shape (B, Q, heads, C), of x's dtype."""
    return torch.einsum('hqk,bkc->bqhc', maps.to(x.dtype), x.flatten(1, 2))


def attend_by_factors(
        x: torch.Tensor,
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        weight: torch.Tensor,
) -> torch.Tensor:
    """``sum_h (R_h (x) C_h) x W_h``: as :func:`gather_by_factors`, value weights of shape (heads, out_channels, C)."""
    return F.linear(gather_by_factors(row_probs, col_probs, x).flatten(3), weight.transpose(0, 1).flatten(1))


def attend_by_maps(x: torch.Tensor, maps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``sum_h A_h x W_h``: as :func:`gather_by_maps`, value weights of shape (out_channels, heads, C)."""
    return F.linear(gather_by_maps(maps, x).flatten(2), weight.flatten(1))


def maps_of_factors(row_probs: torch.Tensor, col_probs: torch.Tensor) -> torch.Tensor:
    """``R_h (x) C_h`` of probabilities, shapes (heads, H, H) and (heads, W, W): shape (heads, H W, H W)."""
    return (row_probs[:, :, None, :, None] * col_probs[:, None, :, None, :]).flatten(3).flatten(1, 2)


def attend_to_factors(
        x: torch.Tensor,
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        weight: torch.Tensor,
) -> torch.Tensor:
    """`attend_by_factors` of a group."""
    rows, cols = F.threshold(row_probs.to(x.dtype), TINY, 0.), F.threshold(col_probs.to(x.dtype), TINY, 0.)
    (images, height, width, dim), (heads, out_height, _) = x.shape, rows.shape
    pixels = x.permute(1, 2, 0, 3).contiguous().flatten(2)
    if out_height * cols.shape[1] < height * width:  # gathers first: fewer queries than keys are to have values
        met = (rows.flatten(0, 1) @ pixels.flatten(1)).view(heads, out_height, width, -1)
        gathered = (cols[:, None] @ met).view(heads, -1, dim).transpose(0, 1).flatten(1)
        out = gathered @ weight.transpose(1, 2).flatten(0, 1)
    else:
        values = torch.bmm(pixels.view(-1, dim).expand(heads, -1, -1), weight.transpose(1, 2))
        met = x.new_empty(out_height, heads, width * images * weight.shape[1])
        torch.bmm(rows, values.view(heads, height, -1), out=met.transpose(0, 1))
        factor = cols.transpose(0, 1).flatten(1).expand(out_height, -1, -1)
        out = torch.bmm(factor, met.view(out_height, heads * width, -1))
    return out.view(out_height, cols.shape[1], images, -1).permute(2, 0, 1, 3)


def gradients_by_factors(
        needs: Sequence[bool],
        grad: torch.Tensor,
        x: torch.Tensor,
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        weight: torch.Tensor,
) -> Gradients:
    """Gradients of :func:`attend_to_factors`, where needed, from its result's, shape (B, Q1, Q2, out_channels)."""
    rows, cols = F.threshold(row_probs.to(x.dtype), TINY, 0.), F.threshold(col_probs.to(x.dtype), TINY, 0.)
    (images, height, width, dim), heads = x.shape, len(rows)
    rows, cols = rows.flatten(0, 1), cols[:, None]
    pixels, back = (t.permute(1, 2, 0, 3).contiguous() for t in (x, grad))
    pixels, back = pixels.flatten(1), back.view(-1, weight.shape[1])
    met = (rows @ pixels).view(heads, -1, width, images * dim)
    gathered = cols @ met
    shape, gathered = gathered.shape, gathered.view(heads, -1, dim)
    grad_weight = back.T.contiguous() @ gathered if needs[3] else None
    # what was gathered is not needed any more, nor are rows once columns have their gradient
    of_gathered = torch.matmul(back, weight, out=gathered).view(shape)
    sums = torch.promote_types(x.dtype, torch.float32)
    grad_cols = (of_gathered @ met.transpose(2, 3)).sum(1, dtype=sums) if needs[2] else None
    of_met = torch.matmul(cols.transpose(2, 3), of_gathered, out=met).view(len(rows), -1)
    grad_rows = (of_met @ pixels.T).view(row_probs.shape) if needs[1] else None
    grad_x = (rows.T @ of_met).view(height, width, images, dim).permute(2, 0, 1, 3) if needs[0] else None
    return grad_x, grad_rows, grad_cols, grad_weight


by_factors = Kernel(
    'factors', attend_by_factors, attend_to_factors, gradients_by_factors,
    axes=((0, None), (None, 0), (None, 0), (None, 0)), out_axes=(0, None))


def attend_to_maps(x: torch.Tensor, maps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`attend_by_maps` of a group, a query's heads side by side."""
    maps = F.threshold(maps.to(x.dtype), TINY, 0.).transpose(0, 1)
    gathered = torch.bmm(maps.flatten(0, 1).expand(len(x), -1, -1), x.flatten(1, 2))
    return gathered.view(len(x), len(maps), -1) @ weight.flatten(1).T


def gradients_by_maps(
        needs: Sequence[bool],
        grad: torch.Tensor,
        x: torch.Tensor,
        maps: torch.Tensor,
        weight: torch.Tensor,
) -> Gradients:
    """Gradients of :func:`attend_to_maps`, where needed, from its result's, shape (B, Q, out_channels)."""
    rows = F.threshold(maps.to(x.dtype), TINY, 0.).transpose(0, 1).flatten(0, 1).expand(len(x), -1, -1)
    pixels, back = x.flatten(1, 2), grad.reshape(-1, len(weight))
    gathered = torch.bmm(rows, pixels)
    features = gathered.view(len(back), -1)
    grad_weight = (back.T.contiguous() @ features).view(weight.shape) if needs[2] else None
    torch.mm(back, weight.flatten(1), out=features)  # what was gathered is not needed any more
    grad_maps = grad_x = None
    if needs[1]:
        grad_maps = (gathered @ pixels.transpose(1, 2)).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
        grad_maps = grad_maps.view(maps.shape[1], len(maps), -1).transpose(0, 1)
    if needs[0]:
        grad_x = torch.bmm(rows.transpose(1, 2), gathered).view(x.shape)
    return grad_x, grad_maps, grad_weight


by_maps = Kernel(
    'maps', attend_by_maps, attend_to_maps, gradients_by_maps,
    axes=((0, None), (None, 0), (None, 1)), out_axes=(0, None))


@torch.compiler.assume_constant_result
def map_keys() -> int:
    """Keys up to which, and up to a layer's channels, the CPU is faster by maps than by factors in bfloat16."""
    capabilities: Any = getattr(torch.cpu, 'get_capabilities', dict)()  # older torches can't say
    return sys.maxsize if capabilities.get('amx_bf16') else 64 if capabilities.get('avx512_bf16') else 0


@torch.fx.wrap
@register_notrace_function
def separable_attention(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend with the product of row and column probabilities: ``sum_h (R_h (x) C_h) x W_h + bias``.

    What all heads gather is never held, and (H W) x (H W) maps only where they are faster. Under autocast it computes
    in autocast's dtype, as a linear map does. Tracers and functional transforms see plain operators.

    Args:
        row_probs: Probabilities of key rows, the same for all columns and images, shape (heads, Q1, H), query before
            key.
        col_probs: Probabilities of key columns, shape (heads, Q2, W).
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.

    Returns:
        Shape (B, Q1, Q2, out_channels).
    """
    if not torch.jit.is_scripting():
        dtype = kernel_dtype(x)
        if dtype is not None:
            (heads, height, _), width = row_probs.shape, col_probs.shape[1]
            if (dtype == torch.bfloat16 and x.device.type == 'cpu'
                    and x.shape[1] * x.shape[2] <= min(x.shape[3], map_keys())):
                out = map_attention(maps_of_factors(row_probs, col_probs), x, weight, bias)
                return out.unflatten(1, (height, width))
            met = height * (x.shape[2] + width)  # pixels, by rows and then by columns too
            weights = weight.to(dtype).unflatten(1, (heads, -1)).transpose(0, 1)
            if dtype == torch.bfloat16:  # its products copy what does not lie in one piece: once, not for each group
                weights = weights.contiguous()
            out = by_factors(
                (len(x), height, width, len(weight)), met * max(x.shape[3], len(weight)) * dtype.itemsize,
                x.to(dtype), row_probs, col_probs, weights)
            return out if bias is None else out + bias.to(dtype)
    return F.linear(gather_by_factors(row_probs, col_probs, x).flatten(3), weight, bias)


def map_attention(
        probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend with maps that all images share: ``sum_h A_h x W_h + bias``.

    What all heads gather is never held for more images than fit into the cache, and not kept. Under autocast it
    computes in autocast's dtype, as a linear map does. Tracers and functional transforms see plain operators.

    Args:
        probs: Probabilities, shape (heads, Q, H W), query before key.
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.

    Returns:
        Shape (B, Q, out_channels).
    """
    dtype = kernel_dtype(x)
    if dtype is None:
        return F.linear(gather_by_maps(probs, x).flatten(2), weight, bias)
    heads, queries, _ = probs.shape
    out = by_maps(
        (len(x), queries, len(weight)), queries * max(x.shape[3], len(weight)) * dtype.itemsize,
        x.to(dtype), probs, weight.to(dtype).unflatten(1, (heads, -1)))
    return out if bias is None else out + bias.to(dtype)
