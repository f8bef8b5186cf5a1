"""Theorem 1 with a relative encoding of two dimensions instead of three.

On a grid of W columns every offset has a unique number ``t = (2 W - 1) d1 + d2``. With ``r_delta = (t^2, t)`` and
``v = -alpha (1, -2 t0)`` the score is ``-alpha (t - t0)^2`` up to a constant, with its maximum at offset number t0.
"""
import torch

from timm_selfconv.layers.encodings import axis_offsets

__all__ = ['line_maps', 'offset_numbers']


def offset_numbers(offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Unique numbers of offsets, shape (..., 2), rows first, on grids of ``width`` columns: shape (...)."""
    return (2 * width - 1) * offsets[..., 0] + offsets[..., 1]


def line_maps(offsets: torch.Tensor, height: int, width: int, alpha: float) -> torch.Tensor:
    """Attention maps of heads with the encoding ``(t^2, t)``.

    Where the key at the offset is on the grid, the other keys get at most ``2 sum_n e^(-alpha n^2)``, n >= 1, together.

    Args:
        offsets: Offset of each head, (row, column) of ``key - query`` in pixels, integers, shape (heads, 2).
        height, width: Rows H and columns W of the grid.
        alpha: Sharpness, above 0.

    Returns:
        Probabilities, shape (heads, H, W, H, W), query before key, in float64.
    """
    rows, cols = (axis_offsets(size, offsets.double()) for size in (height, width))
    numbers = (2 * width - 1) * rows[:, None, :, None] + cols[None, :, None, :]
    scores = -alpha * (numbers - offset_numbers(offsets.double(), width)[:, None, None, None, None]).square()
    return scores.flatten(-2).softmax(-1).view_as(scores)
