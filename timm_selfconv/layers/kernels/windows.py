"""Attention of Gaussian heads with a full precision on large grids: each within the key rows that it looks at.

Other key rows hold less than rounding of a head's probability, and are left out. So a local head costs O(HW W) products
where the explicit map costs O((HW)^2).
"""
import math
from typing import Iterator, Tuple

import torch

from ..axis_scores import around_nearest, finite, precision_matrices

__all__ = ['gaussian_windows']


def key_rows(precision: torch.Tensor, distance: torch.Tensor, g1: torch.Tensor, g2: torch.Tensor) -> Tuple[int, int]:
    """The key rows that hold a head's probabilities to rounding, the first one and that after the last.

    In a key row no score is larger than that row's in the marginal Gaussian; the largest of all is at least that of the
    key nearest to the centre. What the keys left out have together is less than the dtype's epsilon.

    Args:
        precision: The head's, shape (2, 2).
        distance: How far each key row lies behind the centre, shape (Q, H).
        g1: How far the key row nearest to the centre does, shape (Q, 1).
        g2: How far the key column nearest to the centre does, shape (W, 1).
    """
    p11, p12, p22 = precision[0, 0], precision[0, 1], precision[1, 1]
    # of a nearly singular precision the marginal one is a difference of equals
    marginal = (p11 - p12.square() / p22.clamp(min=1e-30) - 1e-5 * p11).clamp(min=0.)
    best = -0.5 * (p11 * g1.square() + 2 * p12 * g1 * g2.T + p22 * g2.T.square()).amax(1, keepdim=True)
    lost = math.log(torch.finfo(distance.dtype).eps / (distance.shape[1] * len(g2)))
    kept = (~(-0.5 * marginal * distance.square() - best < lost)).any(0).nonzero()
    return int(kept[0]), int(kept[-1]) + 1


def gaussian_windows(
        centers: torch.Tensor,
        spreads: torch.Tensor,
        height: int,
        width: int,
        first: int,
        last: int,
) -> Iterator[Tuple[torch.Tensor, int, int]]:
    """Attention probabilities of heads with full precisions for some rows of queries, each in its window.

    Args:
        centers: Centre of each head, shape (heads, 2).
        spreads: Square root of each precision, shape (heads, 2, 2).
        height: Rows H of the grid.
        width: Columns W of the grid.
        first: First row of queries.
        last: The row after their last; there are Q of them, or fewer where the grid ends.

    Yields:
        For each head the probabilities of key rows i to j, shape (Q W, (j - i) W), query before key, then i and j.
    """
    precisions = finite(precision_matrices(spreads))
    a1, g1 = around_nearest(centers[:, 0], height)
    a2, g2 = around_nearest(centers[:, 1], width)
    for p, rows, r, cols, c in zip(precisions, a1[:, first:last], g1[:, first:last], a2, g2):
        with torch.no_grad():
            i, j = key_rows(p, rows + r, r, c)
        rows, r, cols, c = rows[:, None, i:j, None], r[:, :, None, None], cols[:, None], c[:, None]
        # the quadratic form of (rows + r, cols + c) without what is the same for all keys
        scores = rows * (p[0, 0] * (0.5 * rows + r) + p[0, 1] * (cols + c))
        scores = scores + cols * (p[1, 1] * (0.5 * cols + c) + p[0, 1] * r)
        yield scores.flatten(2).neg().softmax(-1).flatten(0, 1), i, j
