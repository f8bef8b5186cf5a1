"""Quadratic encoding: each head is a Gaussian around an offset (equation 9, appendix D.1)."""
import copy
from typing import Any, TYPE_CHECKING, Final, Optional, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, register_notrace_module, trunc_normal_

from ..parameters import select_parameter

__all__ = ['QuadraticEncoding', 'around_nearest', 'axis_offsets', 'gaussian_axis_scores']


@torch.fx.wrap
@register_notrace_function
def axis_offsets(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return offsets ``key - query`` along one axis, in pixels, shape (size, size), query before key.

    They are on the device of ``like``, in its dtype or at least float32.
    """
    positions = torch.arange(size, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return positions[None, :] - positions[:, None]


def gaussian_axis_scores(
        centers: torch.Tensor,
        precision: torch.Tensor,
        size: int,
        queries: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Log-Gaussian scores along one axis, ``-precision / 2 * (delta - center)^2`` up to a constant per query.

    The softmax ignores the constant. Here it makes the score of the key nearest to the centre 0, so the other scores
    are exact to rounding for far centres, sharp heads and large grids.

    Args:
        centers: Centre of each head along the axis, in pixels, shape (heads,).
        precision: Inverse variance of each head along the axis, in 1 / pixels^2, shape (heads,).
        size: Number of keys along the axis.
        queries: Positions of the queries, shape (queries,); default: all keys.

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
    """Split ``delta - centre`` at the key nearest to the centre.

    Arguments are as in :func:`gaussian_axis_scores`. Return the offset from the nearest key to each key, shape (heads,
    queries, size), and from the centre to the nearest key, shape (heads, queries, 1). Centres are clamped to +-1e30,
    like precisions, to avoid 0 * inf.
    """
    keys = torch.arange(size, device=centers.device, dtype=torch.promote_types(centers.dtype, torch.float32))
    centers = centers.to(keys.dtype).clamp(-1e30, 1e30)[:, None, None]
    queries = (keys if queries is None else queries)[:, None]
    nearest = (centers.detach() + queries).round().clamp(0, size - 1)
    return keys - nearest, nearest - queries - centers


@register_notrace_module
class QuadraticEncoding(nn.Module):
    """Quadratic encoding, equation (9): the attention of a head is a Gaussian around an offset from the query.

    ``r_delta`` is ``(|delta|^2, delta_1, delta_2)``, or ``(delta_1^2, delta_2^2, delta_1, delta_2, delta_1 delta_2)``
    with a full precision.

    Attributes:
        centers: Centres of the heads, (row, column) offsets in pixels, shape (heads, 2).
        spreads: Inverse standard deviations, shape (heads,), or square roots ``S`` of the precisions, shape
            (heads, 2, 2).
        query_weight: Coefficients of ``r_delta`` from queries (``W_key`` with a hat in equation 8), shape
            (heads, head_dim, 3 or 5). Only with the content-position term.
    """
    full: Final[bool]
    position: Final[bool]
    content_position: Final[bool]
    if TYPE_CHECKING:  # not for torchscript: parameters of unused terms are None
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
            full: Use a full 2 x 2 precision per head instead of one spread.
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
        """Initialise centres by N(0, 2) and spreads by 1 (or I) + N(0, 0.01), as in the released code."""
        if self.position:
            nn.init.normal_(self.centers, std=2.)
            nn.init.normal_(self.spreads, std=0.01)
            with torch.no_grad():
                (self.spreads.diagonal(dim1=1, dim2=2) if self.spreads.dim() == 3 else self.spreads).add_(1.)
        if self.content_position:
            trunc_normal_(self.query_weight, std=0.02)

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep these heads, shape (n,), and remove the others."""
        for name in ('centers', 'spreads', 'query_weight'):
            select_parameter(self, name, heads)

    def precisions(self) -> torch.Tensor:
        """Return the precision ``Sigma^-1`` of each head (appendix D.1), at least float32, shape (heads, 2, 2)."""
        spreads = self.spreads.to(torch.promote_types(self.spreads.dtype, torch.float32))
        if not self.full:
            spreads = spreads[:, None, None] * torch.eye(2, device=spreads.device, dtype=spreads.dtype)
        # no matrix product, which autocast would run in half precision
        return (spreads[:, :, None, :] * spreads[:, None, :, :]).sum(-1).clamp(-1e30, 1e30)

    def offset_tables(self, height: int, width: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the position term of equation (8) by offset, ``rows[d1] + cols[d2] + cross d1 d2``, up to a constant.

        Returns:
            Table of row offsets from ``-(height - 1)`` to ``height - 1``, shape (heads, 2 height - 1), of column
            offsets, (heads, 2 width - 1), and ``cross``, (heads,). All are float64 on the CPU, as some devices lack it.
        """
        centers, precision = self.centers.cpu().double(), copy.deepcopy(self).cpu().double().precisions()
        tables = []
        for axis, size in enumerate((height, width)):
            offsets = torch.arange(1 - size, size)
            distance = offsets - centers[:, axis, None]
            # the linear part of the product of both distances
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
        """Return row and column scores of the terms in offsets, up to a constant per query.

        Args:
            query: Scaled queries, shape (B, heads, Q, W, head_dim), for the content-position term.
            height, width: Number of rows H and columns W.
            queries: Rows of the queries, shape (Q,); default: all H.

        Returns:
            Row scores, (B or 1, heads, Q, W or 1, H), column scores, (B or 1, heads, Q or 1, W, W), and for a full
            precision coupled scores, (B or 1, heads, Q, W, H, W); key axes last.
        """
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.position:
            a1, g1 = around_nearest(self.centers[:, 0], height, queries)
            a2, g2 = around_nearest(self.centers[:, 1], width)
            a1, g1, a2, g2 = a1[None, :, :, None], g1[None, :, :, None], a2[None, :, None], g2[None, :, None]
            if self.full:  # the quadratic form of (a1 + g1, a2 + g2), up to a constant per query
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
            here = self.query_weight.new_zeros(1)  # a centre at the query
            d1, d2 = around_nearest(here, height, queries)[0][0], around_nearest(here, width)[0][0]
            weights = torch.einsum('bhijd,hdp->bhijp', query, self.query_weight).to(d1.dtype)
            squares = 2 if self.full else 1  # an isotropic encoding has one weight for both squares
            of_rows = weights[..., :1] * d1.square()[:, None] + weights[..., squares:squares + 1] * d1[:, None]
            of_cols = weights[..., squares - 1:squares] * d2.square() + weights[..., squares + 1:squares + 2] * d2
            rows = of_rows if rows is None else rows + of_rows
            cols = of_cols if cols is None else cols + of_cols
            if self.full:
                product = weights[..., 4, None, None] * d1[:, None, :, None] * d2[None, :, None, :]
                cross = product if cross is None else cross + product
        assert rows is not None and cols is not None
        return rows, cols, cross
