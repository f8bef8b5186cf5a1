"""Theorem 1 with a relative encoding of two dimensions, one fewer than it asks for.

On a grid of bounded size every offset has a number of its own, ``t = (2 W - 1) d1 + d2``: it lies on a line. So
``r_delta = (t^2, t)`` and ``v = -alpha (1, -2 t0)`` score ``-alpha (t - t0)^2`` up to a constant, whose only maximum
is at the offset of number t0. One dimension is too few: a score that is linear in one number peaks at the smallest or
at the largest of them, at two offsets at most.
"""
import torch

from timm_selfconv.layers.encodings import axis_offsets

__all__ = ['line_maps', 'offset_numbers']


def offset_numbers(offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Number offsets, shape (..., 2), rows first: shape (...), each another one on grids of so many columns."""
    return (2 * width - 1) * offsets[..., 0] + offsets[..., 1]


def line_maps(offsets: torch.Tensor, height: int, width: int, alpha: float) -> torch.Tensor:
    """Attention maps of heads that look at offsets through the encoding ``(t^2, t)``.

    A query whose key at the offset is on the grid gives other keys at most ``2 sum_n e^(-alpha n^2)``, n >= 1, of its
    attention: their numbers are other integers. With the quadratic encoding of three dimensions it is about
    ``4 e^-alpha``, as a pixel has four neighbours.

    Args:
        offsets: (row, column) of ``key - query`` for each head, shape (heads, 2), integers, at most the grid's.
        height: Rows H of the grid.
        width: Columns W of the grid.
        alpha: Sharpness, above 0.

    Returns:
        Probabilities, shape (heads, H, W, H, W), query before key, in float64.
    """
    rows, cols = (axis_offsets(size, offsets.double()) for size in (height, width))
    numbers = (2 * width - 1) * rows[:, None, :, None] + cols[None, :, None, :]
    scores = -alpha * (numbers - offset_numbers(offsets.double(), width)[:, None, None, None, None]).square()
    return scores.flatten(-2).softmax(-1).view_as(scores)
