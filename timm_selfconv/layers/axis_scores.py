"""Offsets between the positions of an axis, and what encodings make of them: pure functions."""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

__all__ = [
    'at_least_float32', 'axis_offsets', 'gaussian_axis_scores', 'precision_matrices', 'relative_table',
    'resample_table',
]


@torch.fx.wrap
@register_notrace_function
def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32, the rest as it is: offsets and their scores need more than 8 bits."""
    return x.float() if x.dtype == torch.float16 or x.dtype == torch.bfloat16 else x


def axis_offsets(size: int, like: torch.Tensor, queries: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Offsets ``key - query`` between positions of one axis.

    Args:
        size: Number of positions along the axis, all of them keys.
        like: Tensor whose device and (at least float32) dtype the result takes.
        queries: Positions of the queries, of that device and dtype, shape (queries,); all positions by default.

    Returns:
        Offsets in pixels, shape (queries, size), query before key.
    """
    positions = torch.arange(size, device=like.device, dtype=at_least_float32(like).dtype)
    if queries is None:
        queries = positions
    return positions[None, :] - queries[:, None]


def gaussian_axis_scores(
        centers: torch.Tensor,
        precision: torch.Tensor,
        size: int,
        queries: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Log-Gaussian scores along one axis, ``-precision / 2 * (delta - center)^2`` up to a constant per query.

    The softmax sees no such constant, nor does equation (9) of the paper have this one. It is chosen such that the
    score of the key nearest to the centre is 0, and each other one is right to rounding, however far the centre, sharp
    the head and large the grid.

    Args:
        centers: Centre of each head along the axis, in pixels, shape (heads,).
        precision: Inverse variance of each head along the axis, in 1 / pixels^2, shape (heads,).
        size: Number of positions along the axis, all of them keys.
        queries: Positions of the queries, see :func:`axis_offsets`.

    Returns:
        Scores, shape (heads, queries, size), query before key.
    """
    to_nearest, from_center = around_nearest(centers, size, queries)
    return -0.5 * finite(precision)[:, None, None] * to_nearest * (to_nearest + 2 * from_center)


def finite(x: torch.Tensor) -> torch.Tensor:
    """At least float32, held to +-1e30, whose double and whose product with 0 are numbers."""
    return at_least_float32(x).clamp(-1e30, 1e30)


def around_nearest(
        centers: torch.Tensor,
        size: int,
        queries: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Offsets along one axis of some size as seen from the key that is nearest to a head's centre.

    For centres of shape (heads,) and queries as in :func:`axis_offsets`: how far each key lies behind the nearest one,
    shape (heads, queries, size), and that one behind the centre, (heads, queries, 1). Their sum is how far the key lies
    behind the centre.
    """
    centers = finite(centers)[:, None, None]
    offsets = axis_offsets(size, centers, queries)
    first, last = offsets[:, :1], offsets[:, -1:]
    nearest = first + (centers.detach() - first).round().clamp(min=0.).minimum(last - first)
    return offsets - nearest, nearest - centers


def precision_matrices(spreads: torch.Tensor) -> torch.Tensor:
    """Precision ``Sigma^-1`` of each head from its spread (appendix D.1).

    Args:
        spreads: Inverse standard deviations, shape (heads,), or square roots ``S`` of the precisions, shape
            (heads, 2, 2).

    Returns:
        ``spread^2 I`` or ``S S'``, at least float32, shape (heads, 2, 2).
    """
    spreads = at_least_float32(spreads)
    if spreads.dim() == 1:
        return spreads.square()[:, None, None] * torch.eye(2, device=spreads.device, dtype=spreads.dtype)
    # element by element: autocast would run a matrix product in half precision
    return (spreads[:, :, None, :] * spreads[:, None, :, :]).sum(-1)


def sinusoids(size: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Sinusoids of Vaswani et al. (2017) along one axis: sines, then cosines; shape (size, dim), at least float32."""
    dtype = at_least_float32(like).dtype
    bands = torch.arange(dim // 2, device=like.device, dtype=dtype) / (dim // 2)
    angles = torch.arange(size, device=like.device, dtype=dtype)[:, None] / torch.pow(10000., bands)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def check_reach(table: torch.Tensor, size: int) -> None:
    """Raise a ValueError if an axis has more positions than an offset table, shape (2 reach - 1, ...), reaches."""
    reach = (table.shape[0] + 1) // 2
    if size > reach:
        raise ValueError(
            f'the input has {size} positions along an axis, but the encoding reaches {reach}: '
            'create the model with a larger img_size or call set_input_size(img_size=...)')


def relative_table(table: torch.Tensor, size: int) -> torch.Tensor:
    """The row of an offset table for every query and key of one axis.

    Args:
        table: One row per offset, from ``-(reach - 1)`` to ``reach - 1``, shape (2 reach - 1, dim).
        size: Number of positions along the axis.

    Returns:
        Encodings, shape (size, size, dim), query before key.

    Raises:
        ValueError: If the axis has more positions than the table reaches.
    """
    check_reach(table, size)
    positions = torch.arange(size, device=table.device)
    return table[positions[None, :] - positions[:, None] + table.shape[0] // 2]


def resample_table(table: torch.Tensor, reach: int) -> torch.Tensor:
    """Resample an offset table for another image size, offsets scaled with the image.

    Args:
        table: Shape (2 old_reach - 1, dim).
        reach: Number of positions along the axis that the new table serves.

    Returns:
        Table of shape (2 reach - 1, dim), the zero offset in its middle.
    """
    length = 2 * reach - 1
    if table.shape[0] == length:
        return table
    resampled = F.interpolate(at_least_float32(table).T[None], size=length, mode='linear', align_corners=True)
    return resampled[0].T.to(table.dtype).contiguous()
