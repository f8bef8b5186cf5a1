"""Statistics of attention heads: pure functions of attention maps, shape (..., H, W, H, W), query first.

Offsets are ``key - query``, (row, column), in pixels of the maps' grid. Statistics of a query's map have the shape of
the queries, (..., H, W), and are best averaged over :func:`timm_selfconv.theory.interior` queries; statistics of a head
have shape (...) and allow for the border. Maps of another shape are a ValueError.
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
    """Root of the mean squared distance of each query's attention from its centre of mass, in pixels, (..., H, W)."""
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

    Two queries are compared on the offsets that are on the grid for both, their attention there scaled to 1: the sum of
    minima is 1 less the total variation distance. The mean is over all pairs, weighted by the product of their masses
    before scaling. So a head whose scores depend on the offset only has 1, whatever softmax makes of it at the border,
    and a head that looks at one pixel of the image, wherever the query is, has 0. Without pairs to compare it is 1.
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

    As in :func:`translation_consistency`, on the columns with a mirror image on the grid, weighted by the mass there.

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
        dim: Dimension to compare along: -5 the heads of a layer (0: no two share a pixel), 0 the images of a batch
            (1: attention does not depend on them).

    Returns:
        The mean over pairs at each query, shape (..., H, W) without ``dim``.

    Raises:
        ValueError: If there are no two to compare.
    """
    grid_size(maps)
    if maps.dim() < 5 or maps.shape[dim] < 2:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs at least two along dimension {dim} to compare')
    pairs = itertools.combinations(maps.unbind(dim), 2)
    return torch.stack([torch.minimum(a, b).sum((-2, -1)) for a, b in pairs]).mean(0)


def acting_taps(maps: torch.Tensor, kernel_size: KernelSize) -> torch.Tensor:
    """Heads that act as a tap of a convolution, in the sense of Lemma 1.

    A head does if every interior query gives more than half of its attention to the key under that tap. Maps of heads
    that act as different taps are linearly independent: over these taps they are a strictly diagonally dominant matrix.

    Args:
        maps: Attention maps of a layer, shape (..., heads, H, W, H, W). A head has to act so in all leading ones.
        kernel_size: Side, or rows and columns, of the convolution.

    Returns:
        Booleans of shape (heads, taps), in the order of :func:`timm_selfconv.theory.tap_offsets`.

    Raises:
        ValueError: If the kernel does not fit in the grid.
    """
    grid_size(maps)
    acting = (interior(at_taps(maps, kernel_size), kernel_size) > 0.5).all(-1).all(-1)
    return acting.reshape(-1, *acting.shape[-2:]).all(0)
