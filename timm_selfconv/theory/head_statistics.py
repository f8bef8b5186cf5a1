"""Statistics of attention heads: pure functions of attention maps, shape (..., H, W, H, W), query first.

Offsets are ``key - query``, (row, column), in pixels of the maps' grid. What is said of one query's map has the shape
of the queries, (..., H, W); what is said of a whole head, shape (...). Near the border a head can't look where it looks
elsewhere: average the former over :func:`timm_selfconv.theory.interior` queries; the latter takes care of it.
"""
import itertools

import torch

from timm_selfconv.layers.encodings import axis_offsets
from .residual import KernelSize, at_taps, grid_size, interior

__all__ = [
    'acting_taps', 'center_of_mass', 'entropy', 'largest_probability', 'mean_distance', 'mirror_symmetry', 'overlap',
    'spread', 'translation_consistency']


def center_of_mass(maps: torch.Tensor) -> torch.Tensor:
    """Mean offset of each query's attention, (row, column) in pixels, shape (..., H, W, 2)."""
    height, width = grid_size(maps)
    rows = torch.einsum('...ijk,ik->...ij', maps.sum(-1), axis_offsets(height, maps))
    cols = torch.einsum('...ijl,jl->...ij', maps.sum(-2), axis_offsets(width, maps))
    return torch.stack([rows, cols], dim=-1)


def spread(maps: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each query's attention, in pixels, shape (..., H, W).

    It is the root of the mean squared distance from the centre of mass, so of both axes' variances together.
    """
    height, width = grid_size(maps)
    center = center_of_mass(maps)[..., None]
    rows = (axis_offsets(height, maps)[:, None] - center[..., 0, :]).square() * maps.sum(-1)
    cols = (axis_offsets(width, maps) - center[..., 1, :]).square() * maps.sum(-2)
    return (rows.sum(-1) + cols.sum(-1)).sqrt()


def entropy(maps: torch.Tensor) -> torch.Tensor:
    """Entropy of each query's attention, in nats, from 0 to log(H W), shape (..., H, W)."""
    grid_size(maps)
    return torch.special.entr(maps).sum((-2, -1))


def largest_probability(maps: torch.Tensor) -> torch.Tensor:
    """Largest attention probability of each query, shape (..., H, W)."""
    grid_size(maps)
    return maps.amax((-2, -1))


def mean_distance(maps: torch.Tensor) -> torch.Tensor:
    """Mean Euclidean distance of what each query attends to from the query, in pixels, shape (..., H, W)."""
    height, width = grid_size(maps)
    distance = torch.hypot(axis_offsets(height, maps)[:, None, :, None], axis_offsets(width, maps)[None, :, None, :])
    return torch.einsum('...ijkl,ijkl->...ij', maps, distance)


def translation_consistency(maps: torch.Tensor) -> torch.Tensor:
    """Share of a head's pattern that stays as the query moves, in [0, 1].

    Two queries are compared on the offsets that are on the grid for both, their attention there scaled to 1: what they
    have in common is the sum of minima, 1 less the total variation distance. The mean is over all pairs of queries,
    weighted by the product of their masses before scaling: the chance that a draw from each falls where both can look.
    So the border takes nothing from a head whose scores depend on the offset only: it has 1, whatever softmax makes of
    the pixels that are left. A head that looks at one pixel of the image, wherever the query is, has 0.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).

    Returns:
        One number per head, shape (...); 1 where no two queries can be compared.
    """
    height, width = grid_size(maps)
    common, weight = maps.new_zeros(maps.shape[:-4]), maps.new_zeros(maps.shape[:-4])
    for i in range(height):
        for j in range(1 - width if i else 1, width):  # every pair of queries once
            top, bottom = slice(height - i), slice(i, height)
            left, right = slice(max(-j, 0), width - max(j, 0)), slice(max(j, 0), width - max(-j, 0))
            here, there = maps[..., top, left, top, left], maps[..., bottom, right, bottom, right]
            mass, mass_there = here.sum((-2, -1), keepdim=True), there.sum((-2, -1), keepdim=True)
            weight += (mass * mass_there).sum((-4, -3, -2, -1))
            common += torch.minimum(here * mass_there, there * mass).sum((-4, -3, -2, -1))
    return torch.where(weight > 0, common / weight, 1.)


def mirror_symmetry(maps: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Share of a head's pattern that is its own mirror image about the query, in [0, 1].

    As in :func:`translation_consistency`: what the two have in common on the columns whose mirror images are on the
    grid too, a mean over queries weighted by their mass there. In the first and the last column there are none.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).
        dim: -1 mirrors left for right, -2 up for down (the paper, version 1).

    Returns:
        One number per head, shape (...); 1 where there is nothing to compare.
    """
    if dim == -2:
        maps = maps.transpose(-1, -2).transpose(-3, -4)
    _, width = grid_size(maps)
    common, weight = maps.new_zeros(maps.shape[:-4]), maps.new_zeros(maps.shape[:-4])
    for j in range(1, width - 1):
        reach = min(j, width - 1 - j)
        seen = maps[..., :, j, :, j - reach:j + reach + 1]
        weight += seen.sum((-3, -2, -1))
        common += torch.minimum(seen, seen.flip(-1)).sum((-3, -2, -1))
    return torch.where(weight > 0, common / weight, 1.)


def overlap(maps: torch.Tensor, dim: int = -5) -> torch.Tensor:
    """Overlap of two maps, in [0, 1]: the sum of minima, which is 1 less their total variation distance.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).
        dim: Dimension to compare along: -5 the heads of a layer, where 0 says that no two look at the same pixel; 0 the
            images of a batch, where 1 says that attention does not depend on them.

    Returns:
        The mean over pairs at each query, shape (..., H, W) without ``dim``.

    Raises:
        ValueError: If there are no two to compare, or the maps have another shape.
    """
    grid_size(maps)
    if maps.dim() < 5 or maps.shape[dim] < 2:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs at least two along dimension {dim} to compare')
    pairs = itertools.combinations(maps.unbind(dim), 2)
    return torch.stack([torch.minimum(a, b).sum((-2, -1)) for a, b in pairs]).mean(0)


def acting_taps(maps: torch.Tensor, kernel_size: KernelSize) -> torch.Tensor:
    """Heads that act as a tap of a convolution, in the sense of Lemma 1.

    A head does if every interior query gives more than half of its attention to the key under that tap. No two taps can
    have more than half; and maps of heads that act as different taps are linearly independent, as over these taps they
    are a strictly diagonally dominant matrix.

    Args:
        maps: Attention maps of a layer, shape (..., heads, H, W, H, W). A head has to act so in all leading ones.
        kernel_size: Side, or rows and columns, of the convolution.

    Returns:
        Booleans of shape (heads, taps), in the order of :func:`timm_selfconv.theory.tap_offsets`.

    Raises:
        ValueError: If the maps have another shape, or the kernel does not fit in the grid.
    """
    grid_size(maps)
    acting = (interior(at_taps(maps, kernel_size), kernel_size) > 0.5).all(-1).all(-1)
    return acting.reshape(-1, *acting.shape[-2:]).all(0)
