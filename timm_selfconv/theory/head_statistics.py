"""Statistics of attention heads, from attention maps of shape (..., H, W, H, W), query first.

Offsets are ``key - query``, (row, column), in pixels of the maps' grid. Average statistics of queries, shape
(..., H, W), over :func:`timm_selfconv.theory.interior`. Maps of another shape raise a ValueError.
"""
import itertools

import torch

from timm_selfconv.layers.encodings import axis_offsets
from .residual import grid_size

__all__ = [
    'center_of_mass', 'entropy', 'mean_distance', 'mirror_symmetry', 'overlap', 'spread', 'translation_consistency']


def center_of_mass(maps: torch.Tensor) -> torch.Tensor:
    """Mean offset of each query's attention, (row, column) in pixels, shape (..., H, W, 2)."""
    height, width = grid_size(maps)
    rows, cols = maps.sum(-1) * axis_offsets(height, maps)[:, None], maps.sum(-2) * axis_offsets(width, maps)
    return torch.stack([rows.sum(-1), cols.sum(-1)], dim=-1)


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


def mean_distance(maps: torch.Tensor) -> torch.Tensor:
    """Mean Euclidean distance between a query and its keys, in pixels, shape (..., H, W)."""
    height, width = grid_size(maps)
    distance = torch.hypot(axis_offsets(height, maps)[:, None, :, None], axis_offsets(width, maps)[None, :, None, :])
    return (maps * distance).sum((-2, -1))


def translation_consistency(maps: torch.Tensor) -> torch.Tensor:
    """Share of a head's pattern that two queries have in common, in [0, 1], shape (...).

    1 less the total variation distance on the offsets that both queries have on the grid, attention there scaled to 1;
    the mean over pairs is weighted by the product of their masses. Position-only heads have 1.
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
    """Share of a head's pattern that equals its mirror image about the query, in [0, 1].

    Only columns with a mirror image on the grid count.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).
        dim: -1 mirrors left and right, -2 up and down (the paper, version 1).

    Returns:
        One number per head, shape (...); 1 without such columns.

    Raises:
        ValueError: If there is no such dimension to mirror.
    """
    if dim not in (-1, -2):
        raise ValueError(f'dim={dim}: needs -1 for left and right, or -2 for up and down')
    width = grid_size(maps)[dim]
    maps = maps.transpose(dim, -1).transpose(dim - 2, -3)
    common, weight = maps.new_zeros(maps.shape[:-4]), maps.new_zeros(maps.shape[:-4])
    for j in range(1, width - 1):
        reach = min(j, width - 1 - j)
        seen = maps[..., :, j, :, j - reach:j + reach + 1]
        weight += seen.sum((-3, -2, -1))
        common += torch.minimum(seen, seen.flip(-1)).sum((-3, -2, -1))
    return torch.where(weight > 0, common / weight, 1.)


def overlap(maps: torch.Tensor, dim: int = -5) -> torch.Tensor:
    """Overlap of maps, in [0, 1]: 1 less the total variation distance, mean over pairs.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).
        dim: Dimension to compare along: -5 for the heads of a layer, 0 for the images of a batch.

    Returns:
        Overlap of each query, shape (..., H, W) without ``dim``.

    Raises:
        ValueError: If there are no two to compare.
    """
    grid_size(maps)
    if dim % maps.dim() > maps.dim() - 5 or maps.shape[dim] < 2:
        raise ValueError(
            f'maps of shape {list(maps.shape)}: needs at least two along dimension {dim}, which is before H, W, H, W')
    pairs = itertools.combinations(maps.unbind(dim), 2)
    return torch.stack([torch.minimum(a, b).sum((-2, -1)) for a, b in pairs]).mean(0)
