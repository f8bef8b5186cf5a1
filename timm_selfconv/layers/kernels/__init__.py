"""Attention kernels that walk through a batch in groups, and their definition in plain operators.

- operators: the definition.
- factors: position-only attention as the product of row and column factors. maps: by maps that all images share.
- content: attention to keys, without a tensor of all scores.
- low_rank: position-only attention by heads at their rank, to a tolerance.
- windows: position-only attention that has no factors, on large grids: Gaussian heads in the key rows they look at.
- kernel: ``Kernel``, what makes an operator with gradients of a function in groups.
"""
from typing import Any, Optional

import torch

from timm.layers import register_notrace_function

from ..linear import autocast_dtype
from ..observed import needs_plain_ops
from .content import by_keys, fused_attention
from .factors import by_factors
from .maps import by_maps, maps_of_factors
from .operators import attend_by_factors, attend_by_maps, attend_to_keys

__all__ = ['key_attention', 'map_attention', 'maps_are_faster', 'separable_attention']


@torch.compiler.assume_constant_result
def has_matrix_units() -> bool:
    """Return True if the CPU multiplies bfloat16 matrices natively (AMX)."""
    capabilities: Any = getattr(torch.cpu, 'get_capabilities', dict)  # older torches can't say
    return capabilities().get('amx_bf16', False)


def maps_are_faster(x: torch.Tensor) -> bool:
    """Return True if maps are faster than factors for an input, shape (B, H, W, C): small grids, matrix units."""
    return (
        x.device.type == 'cpu' and x.dtype == torch.bfloat16 and x.shape[1] * x.shape[2] <= x.shape[3]
        and has_matrix_units())


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
        row_probs: Probabilities of key rows, the same for all columns and images, shape (heads, H, H), query before
            key.
        col_probs: Probabilities of key columns, shape (heads, W, W).
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.

    Returns:
        Shape (B, H, W, out_channels).
    """
    if torch.jit.is_scripting():
        return attend_by_factors(row_probs, col_probs, x, weight, bias)
    else:  # torchscript compiles what follows a return, but not an else
        if needs_plain_ops(x, False):
            return attend_by_factors(row_probs, col_probs, x, weight, bias)
        dtype = autocast_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if maps_are_faster(x):
            return by_maps(maps_of_factors(row_probs, col_probs), x, weight, bias).unflatten(1, x.shape[1:3])
        return by_factors(row_probs, col_probs, x, weight, bias)


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
    if needs_plain_ops(x, False):
        return attend_by_maps(probs, x, weight, bias)
    dtype = autocast_dtype(x)
    return by_maps(probs, x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@torch.fx.wrap
@register_notrace_function
def key_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """Values gathered by the softmax of content, row and column scores, of which no tensor is kept.

    Args:
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, dim).
        key: Keys, shape (B, heads, N, dim).
        value: Values, shape (B, heads or 1, N, channels); they take the queries' dtype.
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), N = H W, the largest of each query 0; or None.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), with row scores.
        dropout_p: Rate at which probabilities are dropped, where the device's kernels can.

    Returns:
        Shape (B, Q W, heads, channels).
    """
    value = value.to(query.dtype)
    if not torch.jit.is_scripting():  # a condition of its own, for what is in it is not compiled then
        if not needs_plain_ops(query, False):
            if query.device.type == 'cpu':
                return by_keys(query, key, value, rows, cols)
            return fused_attention(query, key, value, rows, cols, dropout_p)
    return attend_to_keys(query, key, value, rows, cols)
