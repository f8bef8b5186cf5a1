"""Distance of a layer's attention maps from expressing every convolution.

Lemma 1 of the paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584) asks for one head per kernel tap, with all
of its attention there. Lemma 3 generalises it: at every query, the span of the heads' maps holds the unit vector of
every tap. Here stands by how much it doesn't.
"""
from dataclasses import dataclass
from typing import Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple

from timm_selfconv.layers.conv_attention import tap_centers

__all__ = ['ConvResidual', 'KernelSize', 'at_taps', 'conv_residual', 'grid_size', 'interior', 'tap_offsets']

KernelSize = Union[int, Tuple[int, int]]


@dataclass(frozen=True)
class ConvResidual:
    """Distance of a layer from expressing every K x K convolution: 0 expresses all of them, 1 nothing of any.

    A tap's residual is the squared distance of its unit vector from the span of the heads' maps, and each number here
    is a mean over taps. It is at least 1 - heads / taps; maps that span any directions at random leave
    1 - heads / keys.

    Attributes:
        per_query: Residual of each query with coefficients of its own (Lemma 3), over the taps that fall on the grid,
            shape (..., H, W).
        layer: Mean over interior queries, those whose taps all fall on the grid; 0 where Lemma 3 holds.
        shared: The same with one set of coefficients for all of them, and for all leading axes. Value matrices are such
            coefficients, so the layer can be every convolution if and only if this is 0. It is at least ``layer``.
    """
    per_query: torch.Tensor
    layer: float
    shared: float


def grid_size(maps: torch.Tensor) -> Tuple[int, int]:
    """Rows and columns of attention maps, shape (..., H, W, H, W), a ValueError if they have another shape."""
    if maps.dim() < 4 or maps.shape[-4:-2] != maps.shape[-2:]:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs (..., height, width, height, width), query first')
    return maps.shape[-2], maps.shape[-1]


def same_padding(kernel_size: KernelSize) -> Tuple[int, int, int, int]:
    """Padding of torch's 'same' on the left, right, top and bottom, a ValueError if it is no kernel size."""
    size = to_2tuple(kernel_size)
    if len(size) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in size):
        raise ValueError(f'kernel_size={kernel_size!r}: needs a positive integer, or two: rows and columns')
    top, left = (size[0] - 1) // 2, (size[1] - 1) // 2
    return left, size[1] - 1 - left, top, size[0] - 1 - top


def tap_offsets(kernel_size: KernelSize) -> torch.Tensor:
    """Offsets ``key - query`` of a kernel's taps, in the order of its weights, where torch's 'same' padding puts them.

    Args:
        kernel_size: Side, or rows and columns. An even side reaches one further down or right than up or left.

    Returns:
        (row, column) offsets in pixels, shape (taps, 2).
    """
    same_padding(kernel_size)  # refuses what is no kernel size
    return tap_centers(to_2tuple(kernel_size), (1, 1))


def at_taps(maps: torch.Tensor, kernel_size: KernelSize) -> torch.Tensor:
    """Attention of every query to the keys under a kernel's taps.

    Args:
        maps: Attention maps, or other numbers for queries and keys, shape (..., H, W, H, W).
        kernel_size: Side, or rows and columns.

    Returns:
        Shape (..., taps, H, W), in the order of :func:`tap_offsets`, zero for taps outside the grid.
    """
    left, right, top, bottom = same_padding(kernel_size)
    padded = F.pad(maps, (left, right, top, bottom))
    return torch.stack([
        padded.diagonal(i, dim1=-4, dim2=-2).diagonal(j, dim1=-3, dim2=-2)
        for i in range(top + bottom + 1) for j in range(left + right + 1)
    ], dim=-3)


def interior(values: torch.Tensor, kernel_size: KernelSize) -> torch.Tensor:
    """Values, shape (..., H, W), of the interior queries: those whose taps all fall on the grid.

    Raises:
        ValueError: If there are none.
    """
    left, right, top, bottom = same_padding(kernel_size)
    height, width = values.shape[-2:]
    if height <= top + bottom or width <= left + right:
        raise ValueError(f'kernel_size={kernel_size!r}: needs a kernel that fits in a grid of {height} x {width}')
    return values[..., top:height - bottom, left:width - right]


def span_basis(vectors: torch.Tensor, rtol: float) -> torch.Tensor:
    """Orthonormal basis of the span of vectors, shape (..., length, number), columns of zeros where it is smaller.

    Directions whose singular value is at most ``rtol`` times the largest do not count.
    """
    basis, singular, _ = torch.linalg.svd(vectors, full_matrices=False)
    return basis * (singular > rtol * singular[..., :1])[..., None, :]


def conv_residual(maps: torch.Tensor, kernel_size: KernelSize) -> ConvResidual:
    """Measure how far a layer is from expressing every K x K convolution (Lemma 3).

    The squared distance of a unit vector from a span is 1 less its squared projection, so an orthonormal basis of the
    maps (float64) answers for all taps at once.

    A zero-padded convolution uses fewer taps at the border, which one set of value matrices can't do: softmax gives a
    query all of its attention wherever it is. So a layer is judged by its interior queries, as the paper crops outputs.

    Maps that are nearly equal span a direction which only large and opposite values can use. It counts if its singular
    value is more than max(keys, heads) * eps of the largest, eps of the maps' dtype: if it is no rounding error.

    Args:
        maps: Attention maps of a layer, shape (..., heads, H, W, H, W), query first; leading axes for images.
        kernel_size: Side, or rows and columns, of the convolution, odd or even; for where its taps lie see
            :func:`tap_offsets`.

    Returns:
        Residuals of the queries and of the layer.

    Raises:
        ValueError: If the maps have another shape, or the kernel does not fit in the grid.
    """
    height, width = grid_size(maps)
    if maps.dim() < 5:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs an axis of heads before the queries')
    interior(maps[..., 0, 0], kernel_size)  # refuses a kernel that does not fit before its taps are made
    heads, keys = maps.shape[-5], height * width
    rtol = max(keys, heads) * torch.finfo(maps.dtype).eps
    vectors = maps.double().movedim(-5, -1).flatten(-3, -2)  # (..., H, W, keys, heads)

    projections = span_basis(vectors, rtol).square().sum(-1).unflatten(-1, (height, width))
    on_grid = at_taps(projections.new_ones(height, width, height, width), kernel_size)
    per_query = (1 - at_taps(projections, kernel_size).sum(-3) / on_grid.sum(-3)).clamp(min=0.)

    # shared: the maps of all interior queries are one long vector per head, the unit vectors of a tap another
    inside = on_grid.amin(-3)
    basis = span_basis((vectors * inside[..., None, None]).flatten(0, -2), rtol).T.view(-1, *projections.shape)
    components = interior(at_taps(basis, kernel_size), kernel_size).movedim(-3, 1).flatten(2)  # (basis, taps, queries)
    shared = 1 - components.sum(-1).square().sum(0).mean() / components.shape[-1]
    return ConvResidual(per_query, float(interior(per_query, kernel_size).mean()), float(shared.clamp(min=0.)))
