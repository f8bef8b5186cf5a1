"""Windows (footprints) around each query, and their weighted sums."""
from typing import List

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

__all__ = ['aggregate', 'footprint']


def windows(x: torch.Tensor, kernel_size: int, stride: int, dilation: int) -> List[torch.Tensor]:
    """Return one strided view of x, shape (..., H, W), per kernel offset, row by row."""
    reach = dilation * (kernel_size - 1)
    rows, cols = x.shape[-2] - reach, x.shape[-1] - reach
    views: List[torch.Tensor] = []
    for i in range(kernel_size):
        for j in range(kernel_size):
            top, left = i * dilation, j * dilation
            views.append(x[..., top:top + rows:stride, left:left + cols:stride])
    return views


def reflected(x: torch.Tensor, kernel_size: int, dilation: int) -> torch.Tensor:
    """Pad x, shape (B, C, H, W), by reflection for the footprints at its border."""
    margin = dilation * (kernel_size // 2)
    if min(x.shape[-2], x.shape[-1]) <= margin:
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width of at least {margin + 1}')
    if margin > 0:  # autocast pads in float32
        x = F.pad(x, (margin, margin, margin, margin), mode='reflect').to(x.dtype)
    return x


def footprint(x: torch.Tensor, kernel_size: int, stride: int = 1, dilation: int = 1) -> List[torch.Tensor]:
    """Return the pixels in the footprint of each query, with reflection at the border.

    A query is at every stride-th row and column, from the first, in the middle of its footprint.

    Args:
        x: Pixels, shape (B, C, H, W).
        kernel_size: Side of the footprint, odd.
        stride: Distance of queries, in pixels.
        dilation: Distance of the pixels in a footprint.

    Returns:
        One tensor per offset, row by row, shape (B, C, ceil(H / stride), ceil(W / stride)) each.

    Raises:
        ValueError: If the image is too small for reflection.
    """
    return windows(reflected(x, kernel_size, dilation), kernel_size, stride, dilation)


@torch.fx.wrap
@register_notrace_function
def aggregate(
        value: torch.Tensor,
        weights: torch.Tensor,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
) -> torch.Tensor:
    """Sum the values in the footprint of each query, with weights per channel.

    Args:
        value: Values, shape (B, C, H, W).
        weights: Weights, shape (B, kernel_size ^ 2, maps, ceil(H / stride), ceil(W / stride)), offsets row by row.
            Channel j uses map ``j mod maps``.
        kernel_size, stride, dilation: See :func:`footprint`.

    Returns:
        Sums, shape (B, C, ceil(H / stride), ceil(W / stride)).
    """
    # contiguous, so that the shifts of a footprint read whole rows
    weights = weights.to(value.dtype).contiguous()
    shifts = windows(reflected(value.contiguous(), kernel_size, dilation), kernel_size, stride, dilation)
    out = torch.zeros(0)
    for i, shifted in enumerate(shifts):
        shifted = shifted.unflatten(1, [-1, weights.shape[2]])
        out = weights[:, i, None] * shifted if i == 0 else torch.addcmul(out, weights[:, i, None], shifted)
    return out.flatten(1, 2)
