"""The definition of every kernel in plain operators, which tracers and functional transforms see."""
from typing import Optional

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

__all__ = ['attend_by_factors', 'attend_by_maps', 'attend_to_keys', 'gather_by_factors', 'gather_by_maps']


@torch.fx.wrap
@register_notrace_function
def gather_by_factors(row_probs: torch.Tensor, col_probs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gather by row and column factors, ``(R_h (x) C_h) x`` for each head.

    ``softmax(a[k1] + b[k2])`` over all keys is ``softmax(a)[k1] softmax(b)[k2]`` when the keys fill a grid, borders
    included, so an H x W layer costs O(HW (H + W)) where the dense map costs O((HW)^2).

    Args:
        row_probs: Probabilities of key rows, shape (heads, H, H), query before key.
        col_probs: Probabilities of key columns, shape (heads, W, W).
        x: Input, shape (B, H, W, C).

    Returns:
        Shape (B, H, W, heads, C), of x's dtype.
    """
    gathered = torch.einsum('hik,bklc->bhilc', row_probs.to(x.dtype), x)
    return torch.einsum('hjl,bhilc->bijhc', col_probs.to(x.dtype), gathered)


def gather_by_maps(maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gather x, (B, H, W, C), by each head's map, (heads, Q, H W): shape (B, Q, heads, C), of x's dtype."""
    return torch.einsum('hqk,bkc->bqhc', maps.to(x.dtype), x.flatten(1, 2))


def attend_by_factors(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """``sum_h (R_h (x) C_h) x W_h + bias``; see :func:`~timm_selfconv.layers.kernels.separable_attention`."""
    return F.linear(gather_by_factors(row_probs, col_probs, x).flatten(3), weight, bias)


def attend_by_maps(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """``sum_h A_h x W_h + bias``; see :func:`~timm_selfconv.layers.kernels.map_attention`."""
    return F.linear(gather_by_maps(maps, x).flatten(2), weight, bias)


def attend_to_keys(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Values gathered by the softmax of content, row and column scores.

    Args:
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, dim).
        key: Keys, shape (B, heads, N, dim).
        value: Values, shape (B, heads or 1, N, channels).
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), N = H W, or None.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), with row scores.

    Returns:
        Shape (B, Q W, heads, channels).
    """
    scores = query.flatten(2, 3) @ key.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rows is not None and cols is not None:
        scores = scores.unflatten(2, query.shape[2:4]) + (rows[..., :, None] + cols[..., None, :]).flatten(4)
        scores = scores.flatten(2, 3)
    return (scores.softmax(dim=-1).to(value.dtype) @ value).transpose(1, 2)
