"""Position encodings: what a query knows about where a key lies.

The paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584) writes every attention score as a sum of terms in the
relative encoding ``r_delta`` of the offset ``delta = key - query``, in pixels (its equation 8). Three kinds of encoding
stand here, thin modules over functions of an axis:

- quadratic, equation (9): a head is a Gaussian of centre ``Delta`` and precision ``Sigma^-1`` around the query,
  isotropic or with a full 2 x 2 precision (appendix D.1), or with one of rank 1 along a line of numbered offsets;
- learned: one table for row offsets, one for column offsets (Ramachandran et al., 2019);
- absolute, equations (3) and (7): one vector per position, sinusoid or learned, added to what is scored.

Scores of the first two are a row part plus a column part, so a softmax over all keys is the product of a softmax over
key rows and one over key columns. Only the off-diagonal entry of a full precision couples the two axes.
"""
import copy
from typing import TYPE_CHECKING, Final, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, register_notrace_module, resample_abs_pos_embed_nhwc, trunc_normal_

__all__ = [
    'AbsoluteEncoding', 'LearnedEncoding', 'QuadraticEncoding', 'around_nearest', 'at_least_float32', 'axis_offsets',
    'gaussian_axis_scores', 'relative_table', 'resample_table', 'select_parameter',
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
        queries: Positions of the queries, on that device, shape (queries,); all positions by default.

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
    precision = at_least_float32(precision).clamp(max=1e30)[:, None, None]
    return -0.5 * precision * to_nearest * (to_nearest + 2 * from_center)


def around_nearest(
        centers: torch.Tensor,
        size: int,
        queries: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Offsets along one axis of some size as seen from the key that is nearest to a head's centre.

    For centres of shape (heads,) and queries as in :func:`axis_offsets`: how far each key lies behind the nearest one,
    shape (heads, queries, size), and that one behind the centre, (heads, queries, 1). Their sum is how far the key lies
    behind the centre. Centres are held to +-1e30, as precisions are: its double, and its product with 0, are numbers.
    """
    centers = at_least_float32(centers).clamp(-1e30, 1e30)[:, None, None]
    keys = torch.arange(size, device=centers.device, dtype=centers.dtype)
    queries = (keys if queries is None else queries)[:, None]
    nearest = (centers.detach() + queries).round().clamp(0, size - 1)
    return keys - nearest, nearest - queries - centers


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


def relative_table(table: torch.Tensor, size: int, queries: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The row of an offset table for every query and key of one axis.

    Args:
        table: One row per offset, from ``-(reach - 1)`` to ``reach - 1``, shape (2 reach - 1, dim).
        size: Number of positions along the axis, all of them keys.
        queries: Positions of the queries, see :func:`axis_offsets`.

    Returns:
        Encodings, shape (queries, size, dim), query before key.

    Raises:
        ValueError: If the axis has more positions than the table reaches.
    """
    check_reach(table, size)
    positions = torch.arange(size, device=table.device)
    return table[positions[None, :] - (positions if queries is None else queries)[:, None] + table.shape[0] // 2]


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


def select_parameter(module: nn.Module, name: str, index: torch.Tensor, dim: int = 0) -> None:
    """Replace a module's parameter by some of its slices; one that is left out (None) stays so.

    Args:
        module: Module that holds the parameter.
        name: Its name there.
        index: Which slices, in the order they shall have, shape (n,).
        dim: Axis of the slices.
    """
    parameter = getattr(module, name)
    if parameter is not None:
        slices = parameter.detach().index_select(dim, index.to(parameter.device))
        setattr(module, name, nn.Parameter(slices, parameter.requires_grad))


@register_notrace_module
class QuadraticEncoding(nn.Module):
    """Quadratic encoding, equation (9): every head looks at a Gaussian blob at an offset of its own.

    ``r_delta`` is ``(|delta|^2, delta_1, delta_2)``, or ``(delta_1^2, delta_2^2, delta_1, delta_2, delta_1 delta_2)``
    with a full precision.

    Two dimensions are enough: on a line, ``r_delta`` is ``(t^2, t)`` where ``t = T delta_1 + delta_2`` numbers the
    offsets. With ``T = 2 W - 1`` those on grids of up to W columns have a number each, so that
    ``-spread^2 / 2 (t - t_Delta)^2`` can single out any of them. This is the full precision
    ``spread^2 (T, 1)' (T, 1)``, of rank 1: a head looks along its row and on into the rows beside it.

    Attributes:
        centers: Where the heads look, (row, column) offsets in pixels, shape (heads, 2).
        spreads: Inverse standard deviations, shape (heads,), or square roots ``S`` of the precisions, shape
            (heads, 2, 2).
        col_numbers: On a line the numbers of the column offsets, a buffer of shape (T,); else None.
        query_weight: The hatted ``W_key`` of equation (8): a query's coefficients of ``r_delta``, shape
            (heads, head_dim, 3 or 5). Only with the content-position term.
    """
    full: Final[bool]
    position: Final[bool]
    content_position: Final[bool]
    col_numbers: Optional[torch.Tensor]
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
            line_width: Optional[int] = None,
            device=None,
            dtype=None,
    ):
        """
        Args:
            num_heads: Number of heads.
            head_dim: Channels of a query.
            full: Give each head a full 2 x 2 precision instead of one spread.
            position: Keep the position term, ``v r_delta``.
            content_position: Keep the content-position term, ``x_q Wq r_delta``.
            line_width: Number the offsets along a line, for grids of up to so many columns; position term only.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.full = full or line_width is not None
        self.position = position
        self.content_position = content_position

        def parameter(keep: bool, *shape: int) -> Optional[nn.Parameter]:
            return nn.Parameter(torch.empty(shape, **dd)) if keep else None

        self.register_parameter('centers', parameter(position, num_heads, 2))
        self.register_parameter('spreads', parameter(position, num_heads, *((2, 2) if full else ())))
        self.register_parameter('query_weight', parameter(content_position, num_heads, head_dim, 5 if full else 3))
        self.register_buffer('col_numbers', torch.arange(1. - line_width, line_width, **dd) if line_width else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Centres from N(0, 2), spreads 1 (or I) + N(0, 0.01): the standard deviations of the released code."""
        if self.position:
            nn.init.normal_(self.centers, std=2.)
            nn.init.normal_(self.spreads, std=0.01)
            with torch.no_grad():
                (self.spreads.diagonal(dim1=1, dim2=2) if self.spreads.dim() == 3 else self.spreads).add_(1.)
                if self.col_numbers is not None:  # between two rows a number is columns away
                    self.centers[:, 0].round_()
        if self.content_position:
            trunc_normal_(self.query_weight, std=0.02)

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep these heads, integers of shape (n,), and drop the others."""
        for name in ('centers', 'spreads', 'query_weight'):
            select_parameter(self, name, heads)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Number the offsets anew for inputs of other (rows, columns), where they are; heads look where they did."""
        if self.col_numbers is not None:
            with torch.no_grad():
                stride = len(self.col_numbers)
                rows = (self.centers[:, 0] + self.centers[:, 1] / stride).round()
                self.centers[:, 1] += (self.centers[:, 0] - rows) * stride
                self.centers[:, 0] = rows
            self.col_numbers = torch.arange(1 - grid_size[1], grid_size[1]).to(self.col_numbers)

    def precisions(self) -> torch.Tensor:
        """Precision ``Sigma^-1`` of each head (appendix D.1), at least float32, shape (heads, 2, 2)."""
        spreads, numbers = at_least_float32(self.spreads), self.col_numbers
        if spreads.dim() == 1:
            spreads = spreads[:, None, None] * torch.eye(2, device=spreads.device, dtype=spreads.dtype)
        # element by element: autocast would run a matrix product in half precision
        precision = (spreads[:, :, None, :] * spreads[:, None, :, :]).sum(-1)
        if numbers is not None:
            along = torch.tensor([numbers.shape[0], 1], device=precision.device, dtype=precision.dtype)
            precision = precision[:, :1, :1] * along[:, None] * along
        return precision.clamp(-1e30, 1e30)

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
        """Scores of the terms that know positions, split by axis, up to a constant per query.

        Args:
            query: Scaled queries, shape (B, heads, Q, W, head_dim); needed by the content-position term only.
            height: Number of rows H.
            width: Number of columns W.
            queries: Rows of the queries, shape (Q,); all H by default.

        Returns:
            Row scores, (B or 1, heads, Q, W or 1, H), column scores, (B or 1, heads, Q or 1, W, W), and, for a full
            precision, what couples the axes, (B or 1, heads, Q, W, H, W); key axes last.
        """
        numbers = self.col_numbers
        if numbers is not None:
            check_reach(numbers, width)
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
                p = at_least_float32(self.spreads).square().clamp(max=1e30)[:, None, None, None]
                rows, cols = -a1 * p * (0.5 * a1 + g1), -a2 * p * (0.5 * a2 + g2)
        if self.content_position:
            assert query is not None
            d1, d2 = axis_offsets(height, self.query_weight, queries), axis_offsets(width, self.query_weight)
            weights = at_least_float32(torch.einsum('bhijd,hdp->bhijp', query, self.query_weight))
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


@register_notrace_module
class LearnedEncoding(nn.Module):
    """Learned relative encoding: a vector per row offset and a vector per column offset (Ramachandran et al., 2019).

    Attributes:
        row_table: Row offsets from ``-(H - 1)`` to ``H - 1``, shape (2 H - 1, dim).
        col_table: Column offsets, shape (2 W - 1, dim).
        row_keys: ``v`` of equation (8) for row offsets, shape (heads, dim); only with the position term.
        col_keys: The same for column offsets.
    """
    position: Final[bool]
    content_position: Final[bool]
    if TYPE_CHECKING:
        row_keys: torch.Tensor
        col_keys: torch.Tensor

    def __init__(
            self,
            num_heads: int,
            head_dim: int,
            grid_size: Tuple[int, int],
            position: bool = True,
            content_position: bool = False,
            device=None,
            dtype=None,
    ):
        """
        Args:
            num_heads: Number of heads.
            head_dim: Channels of a query. The tables have as many channels, or half as many each if queries meet them:
                the first half of a query meets the row table, the second the column table.
            grid_size: Rows and columns of the largest input.
            position: Keep the position term, ``v r_delta``.
            content_position: Keep the content-position term, ``x_q Wq r_delta``.

        Raises:
            ValueError: If queries meet the tables and head_dim is odd.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.position = position
        self.content_position = content_position
        if content_position and head_dim % 2:
            raise ValueError(f'dim={head_dim}: the content_position term of a learned encoding needs an even number')
        dim = head_dim // 2 if content_position else head_dim
        self.row_table = nn.Parameter(torch.empty(2 * grid_size[0] - 1, dim, **dd))
        self.col_table = nn.Parameter(torch.empty(2 * grid_size[1] - 1, dim, **dd))
        self.register_parameter('row_keys', nn.Parameter(torch.empty(num_heads, dim, **dd)) if position else None)
        self.register_parameter('col_keys', nn.Parameter(torch.empty(num_heads, dim, **dd)) if position else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tables from N(0, 1), keys uniform in +-1 / sqrt(dim), as the released code leaves them."""
        nn.init.normal_(self.row_table)
        nn.init.normal_(self.col_table)
        if self.position:
            bound = self.row_table.shape[1] ** -0.5
            nn.init.uniform_(self.row_keys, -bound, bound)
            nn.init.uniform_(self.col_keys, -bound, bound)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Resample the tables for inputs of other than the present (rows, columns)."""
        for name, reach in (('row_table', grid_size[0]), ('col_table', grid_size[1])):
            table = getattr(self, name)
            setattr(self, name, nn.Parameter(resample_table(table.detach(), reach), table.requires_grad))

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep these heads, integers of shape (n,), and drop the others; the tables serve all heads."""
        for name in ('row_keys', 'col_keys'):
            select_parameter(self, name, heads)

    def offset_tables(self, height: int, width: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The position term of equation (8) by offset; see :meth:`QuadraticEncoding.offset_tables`.

        Raises:
            ValueError: If a table does not reach that far.
        """
        tables = []
        for table, keys, size in ((self.row_table, self.row_keys, height), (self.col_table, self.col_keys, width)):
            check_reach(table, size)
            reach = (table.shape[0] + 1) // 2
            tables.append(keys.cpu().double() @ table[reach - size:reach + size - 1].cpu().double().T)
        return tables[0], tables[1], tables[0].new_zeros(len(tables[0]))

    def forward(
            self,
            query: Optional[torch.Tensor],
            height: int,
            width: int,
            queries: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Scores of the terms that know positions, split by axis; see :meth:`QuadraticEncoding.forward`."""
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        if self.position:
            # sums of products: autocast would run a matrix product in half precision
            row_scores = (at_least_float32(self.row_table)[:, None] * at_least_float32(self.row_keys)).sum(-1)
            col_scores = (at_least_float32(self.col_table)[:, None] * at_least_float32(self.col_keys)).sum(-1)
            rows = relative_table(row_scores, height, queries).permute(2, 0, 1)[None, :, :, None]
            cols = relative_table(col_scores, width).permute(2, 0, 1)[None, :, None]
        if self.content_position:
            assert query is not None
            half = query.shape[-1] // 2
            row_table = relative_table(self.row_table, height, queries)
            of_rows = at_least_float32(torch.einsum('bhijd,ikd->bhijk', query[..., :half], row_table))
            col_table = relative_table(self.col_table, width)
            of_cols = at_least_float32(torch.einsum('bhijd,jld->bhijl', query[..., half:], col_table))
            rows = of_rows if rows is None else rows + of_rows
            cols = of_cols if cols is None else cols + of_cols
        assert rows is not None and cols is not None
        return rows, cols, None


@register_notrace_module
class AbsoluteEncoding(nn.Module):
    """Absolute encoding, equations (3) and (7): one vector per position, added to what queries and keys are made of.

    Attributes:
        table: Learned vectors, shape (H, W, dim); None for sinusoids (Vaswani et al., 2017), which encode rows in one
            half of the channels and columns in the other.
    """
    learned: Final[bool]
    if TYPE_CHECKING:
        table: torch.Tensor

    def __init__(self, dim: int, grid_size: Tuple[int, int], learned: bool = True, device=None, dtype=None):
        """
        Args:
            dim: Channels of the vectors, divisible by 4 for sinusoids.
            grid_size: Rows and columns of the input; sinusoids take any.
            learned: Learn the vectors, else sinusoids.

        Raises:
            ValueError: If sinusoids are asked for with dim not divisible by 4.
        """
        super().__init__()
        self.dim = dim
        self.learned = learned
        if not learned and dim % 4:
            raise ValueError(f"dim={dim}: encoding='sinusoid' needs a multiple of 4")
        table = nn.Parameter(torch.empty(*grid_size, dim, device=device, dtype=dtype)) if learned else None
        self.register_parameter('table', table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            trunc_normal_(self.table, std=0.02)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Resample learned vectors for inputs of other than the present (rows, columns)."""
        if self.learned and tuple(self.table.shape[:2]) != tuple(grid_size):
            table = resample_abs_pos_embed_nhwc(self.table.detach(), list(grid_size))[0]
            self.register_parameter('table', nn.Parameter(table.contiguous(), self.table.requires_grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Encode positions into x, shape (B, H, W, dim), and return the sum, same shape.

        Raises:
            ValueError: If learned vectors are for other rows and columns.
        """
        height, width = x.shape[1], x.shape[2]
        if not self.learned:
            rows, cols = sinusoids(height, self.dim // 2, x), sinusoids(width, self.dim // 2, x)
            vectors = torch.cat([rows[:, None].expand(-1, width, -1), cols[None].expand(height, -1, -1)], dim=-1)
            return x + vectors.to(x.dtype)
        if height != self.table.shape[0] or width != self.table.shape[1]:
            raise ValueError(
                f'the input has {height} x {width} positions, but the learned absolute encoding has '
                f'{self.table.shape[0]} x {self.table.shape[1]}: '
                'create the model with that img_size or call set_input_size(img_size=...)')
        return x + self.table
