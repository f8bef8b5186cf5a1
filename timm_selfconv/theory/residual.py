"""Distance of a layer's attention maps from expressing every convolution.

Lemma 1 of the paper asks for one head per kernel tap, with all of its attention there. Lemma 3 generalises it: at every
query the heads' maps span the unit vector of every tap.
"""
from dataclasses import dataclass
from typing import Tuple, Union

import torch
from timm.layers import to_2tuple

from timm_selfconv.layers.conv_attention import tap_centers

__all__ = ['ConvResidual', 'Kernel', 'KernelSize', 'at_taps', 'conv_residual', 'grid_size', 'interior', 'tap_offsets']

KernelSize = Union[int, Tuple[int, int]]
Kernel = Union[KernelSize, torch.Tensor]  # or offsets of taps


@dataclass(frozen=True)
class ConvResidual:
    """Distance of a layer from expressing every convolution with some taps: 0 for all, 1 for none.

    The residual of a tap is the squared distance of its unit vector from the span of the heads' maps. The numbers here
    are means over taps. They are at least 1 - heads / taps at queries with all taps on the grid.

    Attributes:
        per_query: Residual with separate coefficients for each query (Lemma 3), over the taps on the grid, shape
            (..., H, W); nan without such taps.
        layer: Mean over the queries that count, see :func:`conv_residual`; 0 if Lemma 3 holds.
        shared: The same with one set of coefficients for all queries and leading axes, as value matrices are. The layer
            can be every convolution if and only if this is 0.
    """
    per_query: torch.Tensor
    layer: float
    shared: float


def grid_size(maps: torch.Tensor) -> Tuple[int, int]:
    """Rows and columns of attention maps, shape (..., H, W, H, W), a ValueError if they have another shape."""
    if maps.dim() < 4 or maps.shape[-4:-2] != maps.shape[-2:]:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs (..., height, width, height, width), query first')
    return maps.shape[-2], maps.shape[-1]


def check_kernel_size(kernel_size: KernelSize) -> Tuple[int, int]:
    size = to_2tuple(kernel_size)
    if len(size) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in size):
        raise ValueError(f'kernel_size={kernel_size!r}: needs a positive integer, or two: rows and columns')
    return size


def tap_offsets(kernel_size: KernelSize) -> torch.Tensor:
    """Offsets ``key - query`` of a kernel's taps, in the order of its weights, for torch's 'same' padding.

    Args:
        kernel_size: Side, or rows and columns. An even side reaches one further down or right than up or left.

    Returns:
        (row, column) offsets in pixels, shape (taps, 2).

    Raises:
        ValueError: If the kernel size is invalid.
    """
    return tap_centers(check_kernel_size(kernel_size), (1, 1))


def near_taps(maps: torch.Tensor, kernel: Kernel) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attention to the pixel nearest to each tap, (..., H, W, taps), and whether it is the tap, (H, W, taps)."""
    offsets = kernel if isinstance(kernel, torch.Tensor) else tap_offsets(kernel)
    if offsets.dim() != 2 or offsets.shape[1] != 2 or not len(offsets) or bool((offsets != offsets.long()).any()):
        raise ValueError(f'kernel of shape {list(offsets.shape)}: needs whole offsets of shape (taps, 2)')
    height, width = grid_size(maps)
    rows, cols = (torch.arange(n, device=maps.device)[:, None] + own
                  for n, own in zip((height, width), offsets.long().to(maps.device).T))
    near_rows, near_cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
    keys = near_rows[:, None] * width + near_cols
    on_grid = (rows == near_rows)[:, None] & (cols == near_cols)
    return maps.flatten(-2).gather(-1, keys.expand(*maps.shape[:-2], -1)), on_grid


def at_taps(maps: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Attention of every query to the keys under a kernel's taps.

    Args:
        maps: Attention maps, or other numbers for queries and keys, shape (..., H, W, H, W).
        kernel: Side, or rows and columns; or offsets in pixels, shape (taps, 2).

    Returns:
        Shape (..., taps, H, W), in the order of :func:`tap_offsets` or of the offsets, zero for taps outside the grid.

    Raises:
        ValueError: If the maps or the offsets have another shape, or the kernel size is invalid.
    """
    near, on_grid = near_taps(maps, kernel)
    return (near * on_grid).movedim(-1, -3)


def interior(values: torch.Tensor, kernel_size: KernelSize) -> torch.Tensor:
    """Values, shape (..., H, W), of the queries that have all taps on the grid.

    Raises:
        ValueError: If there are none.
    """
    (rows, cols), (height, width) = check_kernel_size(kernel_size), values.shape[-2:]
    if rows > height or cols > width:
        raise ValueError(f'kernel_size={kernel_size!r}: needs a kernel that fits in a grid of {height} x {width}')
    return values.narrow(-2, (rows - 1) // 2, height - rows + 1).narrow(-1, (cols - 1) // 2, width - cols + 1)


def span_basis(vectors: torch.Tensor, rtol: float) -> torch.Tensor:
    """Orthonormal basis of the span of columns, shape (..., length, number), with zeros if it is smaller."""
    basis, singular, _ = torch.linalg.svd(vectors, full_matrices=False)
    return basis * (singular > rtol * singular[..., :1])[..., None, :]


def conv_residual(maps: torch.Tensor, kernel: Kernel) -> ConvResidual:
    """Measure how far a layer is from expressing every convolution with some taps (Lemma 3).

    Only interior queries count for a kernel of some size, as the paper crops outputs: softmax cannot drop the taps that
    zero padding drops at the border. For a set of offsets, each tap counts at the queries that have it on the grid.
    Singular values up to max(keys, heads) * eps of the largest count as rounding errors.

    Args:
        maps: Attention maps of a layer, shape (..., heads, H, W, H, W), query first; leading axes for images.
        kernel: Side, or rows and columns, of the convolution, odd or even, see :func:`tap_offsets`; or the offsets of
            its taps in pixels, shape (taps, 2).

    Raises:
        ValueError: If the maps have another shape, or the kernel does not fit in the grid.
    """
    height, width = grid_size(maps)
    if maps.dim() < 5:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs an axis of heads before the queries')
    if not isinstance(kernel, torch.Tensor):
        interior(maps[..., 0, 0], kernel)  # refuses a kernel that does not fit before its taps are made
    rtol = max(height * width, maps.shape[-5]) * torch.finfo(maps.dtype).eps
    vectors = maps.double().movedim(-5, -1).flatten(-3, -2)  # (..., H, W, keys, heads)

    projections = span_basis(vectors, rtol).square().sum(-1).unflatten(-1, (height, width))
    explained, on_grid = near_taps(projections, kernel)
    if not on_grid.flatten(0, 1).any(0).all():
        raise ValueError(f'kernel={kernel}: needs offsets that fall on a grid of {height} x {width}')
    counts = on_grid if isinstance(kernel, torch.Tensor) else on_grid.all(-1, keepdim=True).expand_as(on_grid)
    per_query = (1 - (explained * on_grid).sum(-1) / on_grid.sum(-1)).clamp(min=0.)
    layer = (1 - explained[..., counts]).clamp(min=0.).mean()

    # shared: the maps of the queries that count are one long vector per head, the unit vectors of a tap another
    shared = []
    for mask in counts.flatten(0, 1).T.unique(dim=0).view(-1, height, width):
        basis = span_basis((vectors * mask[..., None, None]).flatten(0, -2), rtol).T.view(-1, *projections.shape)
        taps = (counts == mask[..., None]).flatten(0, 1).all(0)
        components = near_taps(basis, kernel)[0][..., taps][..., mask, :].flatten(1, -2)  # (basis, queries, taps)
        shared.append(1 - components.sum(1).square().sum(0) / components.shape[1])
    return ConvResidual(per_query, float(layer), float(torch.cat(shared).mean().clamp(min=0.)))
