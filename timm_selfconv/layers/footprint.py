"""Footprints: the pixels in a square around each query, and their weighted sums."""
from typing import List

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

__all__ = ['aggregate', 'footprint']


def footprint(x: torch.Tensor, kernel_size: int) -> List[torch.Tensor]:
    """Return the pixels in the footprint of each pixel, with reflection at the border.

    Args:
        x: Pixels, shape (B, C, H, W).
        kernel_size: Side of the footprint, odd.

    Returns:
        One tensor per offset, row by row, shape (B, C, H, W) each.

    Raises:
        ValueError: If the image is too small for reflection.
    """
    margin = kernel_size // 2
    height, width = x.shape[-2], x.shape[-1]
    if min(height, width) <= margin:
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width of at least {margin + 1}')
    if margin > 0:  # autocast pads in float32
        x = F.pad(x, (margin, margin, margin, margin), mode='reflect').to(x.dtype)
    views: List[torch.Tensor] = []
    for i in range(kernel_size):
        for j in range(kernel_size):
            views.append(x[..., i:i + height, j:j + width])
    return views


@torch.fx.wrap
@register_notrace_function
def aggregate(value: torch.Tensor, weights: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Sum the values in the footprint of each query, with weights per channel.

    Args:
        value: Values, shape (B, C, H, W).
        weights: Weights, shape (B, kernel_size ^ 2, maps, H, W), offsets row by row. Channel j uses map ``j mod maps``.
        kernel_size: Side of the footprint, odd.

    Returns:
        Sums, shape (B, C, H, W).
    """
    # contiguous, so that the shifts of a footprint read whole rows
    weights = weights.to(value.dtype).contiguous()
    out = torch.zeros(0)
    for i, shifted in enumerate(footprint(value.contiguous(), kernel_size)):
        shifted = shifted.unflatten(1, [-1, weights.shape[2]])
        out = weights[:, i, None] * shifted if i == 0 else torch.addcmul(out, weights[:, i, None], shifted)
    return out.flatten(1, 2)
