"""Quadratic encoding: each head a Gaussian around an offset of its own (equation 9, appendix D.1)."""
import copy
from typing import Any, TYPE_CHECKING, Final, Optional, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, register_notrace_module, trunc_normal_

from ..parameters import select_parameter

__all__ = ['QuadraticEncoding', 'around_nearest', 'axis_offsets', 'gaussian_axis_scores']


@torch.fx.wrap
@register_notrace_function
def axis_offsets(size: int, like: torch.Tensor, queries: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Offsets ``key - query`` between positions of one axis.

    Args:
        size: Number of positions along the axis, all of them keys.
        like: Tensor whose device and (at least float32) dtype the result takes.
        queries: Positions of the queries, on that device, shape (queries,); all positions by default.

    Returns:
        Offsets in pixels, shape (queries, size), query before key.
    """
    positions = torch.arange(size, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
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
    precision = precision.to(to_nearest.dtype).clamp(max=1e30)[:, None, None]
    return -0.5 * precision * to_nearest * (to_nearest + 2 * from_center)


@torch.fx.wrap
@register_notrace_function
def around_nearest(
        centers: torch.Tensor,
        size: int,
        queries: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Offsets along one axis of some size as seen from the key that is nearest to a head's centre.

    For centres of shape (heads,) and queries as in :func:`axis_offsets`: how far each key lies behind the nearest one,
    shape (heads, queries, size), and that one behind the centre, (heads, queries, 1). Their sum is how far the key lies
    behind the centre. Centres are clamped to +-1e30, as precisions are: no product of theirs is infinite, so that zero
    times it is zero.
    """
    keys = torch.arange(size, device=centers.device, dtype=torch.promote_types(centers.dtype, torch.float32))
    centers = centers.to(keys.dtype).clamp(-1e30, 1e30)[:, None, None]
    queries = (keys if queries is None else queries)[:, None]
    nearest = (centers.detach() + queries).round().clamp(0, size - 1)
    return keys - nearest, nearest - queries - centers


@register_notrace_module
class QuadraticEncoding(nn.Module):
    """Quadratic encoding, equation (9): every head looks at a Gaussian blob at an offset of its own.

    ``r_delta`` is ``(|delta|^2, delta_1, delta_2)``, or ``(delta_1^2, delta_2^2, delta_1, delta_2, delta_1 delta_2)``
    with a full precision.

    Attributes:
        centers: Where the heads look, (row, column) offsets in pixels, shape (heads, 2).
        spreads: Inverse standard deviations, shape (heads,), or square roots ``S`` of the precisions, shape
            (heads, 2, 2).
        query_weight: The hatted ``W_key`` of equation (8): a query's coefficients of ``r_delta``, shape
            (heads, head_dim, 3 or 5). Only with the content-position term.
    """
    full: Final[bool]
    position: Final[bool]
    content_position: Final[bool]
    if TYPE_CHECKING:  # torchscript would hold us to these where a term is left out and its parameters are None
        centers: torch.Tensor
        spreads: torch.Tensor
        query_weight: torch.Tensor

    def __init__(
            self,
            num_heads: int,
            head_dim: int,
            full: bool = False,
            position: bool = True,
            content_position: bool = False,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            num_heads: Number of heads.
            head_dim: Channels of a query.
            full: Give each head a full 2 x 2 precision instead of one spread.
            position: Keep the position term, ``v r_delta``.
            content_position: Keep the content-position term, ``x_q Wq r_delta``.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.full = full
        self.position = position
        self.content_position = content_position

        def parameter(keep: bool, *shape: int) -> Optional[nn.Parameter]:
            return nn.Parameter(torch.empty(shape, **dd)) if keep else None

        self.register_parameter('centers', parameter(position, num_heads, 2))
        self.register_parameter('spreads', parameter(position, num_heads, *((2, 2) if full else ())))
        self.register_parameter('query_weight', parameter(content_position, num_heads, head_dim, 5 if full else 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Centres from N(0, 2), spreads 1 (or I) + N(0, 0.01): the standard deviations of the released code."""
        if self.position:
            nn.init.normal_(self.centers, std=2.)
            nn.init.normal_(self.spreads, std=0.01)
            with torch.no_grad():
                (self.spreads.diagonal(dim1=1, dim2=2) if self.spreads.dim() == 3 else self.spreads).add_(1.)
        if self.content_position:
            trunc_normal_(self.query_weight, std=0.02)

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep these heads, integers of shape (n,), and drop the others."""
        for name in ('centers', 'spreads', 'query_weight'):
            select_parameter(self, name, heads)

    def precisions(self) -> torch.Tensor:
        """Precision ``Sigma^-1`` of each head (appendix D.1), at least float32, shape (heads, 2, 2)."""
        spreads = self.spreads.to(torch.promote_types(self.spreads.dtype, torch.float32))
        if not self.full:
            spreads = spreads[:, None, None] * torch.eye(2, device=spreads.device, dtype=spreads.dtype)
        # element by element: autocast would run a matrix product in half precision
        return (spreads[:, :, None, :] * spreads[:, None, :, :]).sum(-1).clamp(-1e30, 1e30)

    def offset_tables(self, height: int, width: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The position term of equation (8) by offset: ``rows[d1] + cols[d2] + cross d1 d2``, to a constant.

        Args:
            height: Rows of the grid.
            width: Columns of the grid.

        Returns:
            Row table, offsets from ``-(height - 1)`` to ``height - 1``, shape (heads, 2 height - 1), column table,
            (heads, 2 width - 1), and what couples the axes, (heads,); float64, on the CPU as some devices lack it.
        """
        centers, precision = self.centers.cpu().double(), copy.deepcopy(self).cpu().double().precisions()
        tables = []
        for axis, size in enumerate((height, width)):
            offsets = torch.arange(1 - size, size)
            distance = offsets - centers[:, axis, None]
            # of the product of both distances, what is linear in one
            linear = precision[:, 0, 1, None] * centers[:, 1 - axis, None] * offsets
            tables.append(linear - 0.5 * precision[:, axis, axis, None] * distance.square())
        return tables[0], tables[1], -precision[:, 0, 1]

    def forward(
            self,
            query: Optional[torch.Tensor],
            height: int,
            width: int,
            queries: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Scores of the terms in offsets, split by axis, up to a constant per query.

        Args:
            query: Scaled queries, shape (B, heads, Q, W, head_dim); needed by the content-position term only.
            height: Number of rows H.
            width: Number of columns W.
            queries: Rows of the queries, shape (Q,); all H by default.

        Returns:
            Row scores, (B or 1, heads, Q, W or 1, H), column scores, (B or 1, heads, Q or 1, W, W), and, for a full
            precision, what couples the axes, (B or 1, heads, Q, W, H, W); key axes last.
        """
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.position:
            a1, g1 = around_nearest(self.centers[:, 0], height, queries)
            a2, g2 = around_nearest(self.centers[:, 1], width)
            a1, g1, a2, g2 = a1[None, :, :, None], g1[None, :, :, None], a2[None, :, None], g2[None, :, None]
            if self.full:  # the quadratic form of (a1 + g1, a2 + g2) without what is the same for all keys
                precision = self.precisions()[..., None, None, None]
                p11, p12, p22 = precision[:, 0, 0], precision[:, 0, 1], precision[:, 1, 1]
                rows = -a1 * p11 * (0.5 * a1 + g1) - a1 * p12 * g2
                cols = -a2 * p22 * (0.5 * a2 + g2) - a2 * p12 * g1
                cross = -(a1 * p12)[..., :, None] * a2[..., None, :]
            else:
                p = self.spreads.to(a1.dtype).square().clamp(max=1e30)[:, None, None, None]
                rows, cols = -a1 * p * (0.5 * a1 + g1), -a2 * p * (0.5 * a2 + g2)
        if self.content_position:
            assert query is not None
            here = self.query_weight.new_zeros(1)  # with its centre at the query, offsets are those from the query
            d1, d2 = around_nearest(here, height, queries)[0][0], around_nearest(here, width)[0][0]
            weights = torch.einsum('bhijd,hdp->bhijp', query, self.query_weight).to(d1.dtype)
            squares = 2 if self.full else 1  # an isotropic encoding has one weight for both
            of_rows = weights[..., :1] * d1.square()[:, None] + weights[..., squares:squares + 1] * d1[:, None]
            of_cols = weights[..., squares - 1:squares] * d2.square() + weights[..., squares + 1:squares + 2] * d2
            rows = of_rows if rows is None else rows + of_rows
            cols = of_cols if cols is None else cols + of_cols
            if self.full:
                product = weights[..., 4, None, None] * d1[:, None, :, None] * d2[None, :, None, :]
                cross = product if cross is None else cross + product
        assert rows is not None and cols is not None
        return rows, cols, cross
