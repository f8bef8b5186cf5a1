"""Attention of Gaussian heads with a full precision on large grids: each within the key rows that it looks at.

Other key rows hold less than rounding of a head's probability, and are left out. So a local head costs O(HW W) products
where the explicit map costs O((HW)^2).
"""
import math
from typing import Iterator, List, Tuple

import torch

from .quadratic import around_nearest

__all__ = ['gaussian_windows']


def key_rows(precision: torch.Tensor, distance: torch.Tensor, g1: torch.Tensor, g2: torch.Tensor) -> List[List[int]]:
    """The key rows that hold each head's probabilities to rounding, the first one and that after the last.

    In a key row no score is larger than that row's in the marginal Gaussian; the largest of all is at least that of the
    key nearest to the centre. What the keys left out have together is less than the dtype's epsilon. All heads are
    asked at once, as a list is read from a CPU's memory without an operator. Distances are offsets from the centre: of
    all key rows, shape (heads, Q, H), of the nearest one, (heads, Q, 1), and of the nearest column, (heads, W, 1).
    """
    p11, p12, p22 = (precision[:, i, j, None, None] for i, j in ((0, 0), (0, 1), (1, 1)))
    # of a nearly singular precision the marginal one is a difference of equals
    marginal = (p11 - p12.square() / p22.clamp(min=1e-30) - 1e-5 * p11).clamp(min=0.)
    g2 = g2.transpose(1, 2)
    best = -0.5 * (p11 * g1.square() + 2 * p12 * g1 * g2 + p22 * g2.square()).amax(2, keepdim=True)
    height = distance.shape[2]
    lost = math.log(torch.finfo(distance.dtype).eps / (height * g2.shape[2]))
    kept = (~(-0.5 * marginal * distance.square() - best < lost)).any(1).int()
    return torch.stack([kept.argmax(1), height - kept.flip(1).argmax(1)], dim=1).tolist()


def gaussian_windows(
        centers: torch.Tensor,
        precisions: torch.Tensor,
        height: int,
        width: int,
        queries: torch.Tensor,
) -> Iterator[Tuple[torch.Tensor, int, int]]:
    """Attention probabilities of heads with full precisions for some rows of queries, each in its window.

    Args:
        centers: Centre of each head, shape (heads, 2).
        precisions: Precision of each head, as encodings give it, shape (heads, 2, 2).
        height: Rows H of the grid.
        width: Columns W of the grid.
        queries: Rows of the queries, shape (Q,).

    Yields:
        For each head the probabilities of key rows i to j, shape (Q W, (j - i) W), query before key, then i and j.
    """
    a1, g1 = around_nearest(centers[:, 0], height, queries)
    a2, g2 = around_nearest(centers[:, 1], width)
    with torch.no_grad():
        windows = key_rows(precisions, a1 + g1, g1, g2)
    for p, rows, r, cols, c, (i, j) in zip(precisions, a1, g1, a2, g2, windows):
        rows, r, cols, c = rows[:, None, i:j, None], r[:, :, None, None], cols[:, None], c[:, None]
        # the quadratic form of (rows + r, cols + c) without what is the same for all keys
        scores = rows * (p[0, 0] * (0.5 * rows + r) + p[0, 1] * (cols + c))
        scores = scores + cols * (p[1, 1] * (0.5 * cols + c) + p[0, 1] * r)
        yield scores.flatten(2).neg().softmax(-1).flatten(0, 1), i, j
