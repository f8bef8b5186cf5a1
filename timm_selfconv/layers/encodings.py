"""Position encodings: what a query knows about where a key lies.

The paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584) writes every attention score as a sum of terms in the
relative encoding ``r_delta`` of the offset ``delta = key - query``, in pixels (its equation 8). Three kinds of encoding
stand here, thin modules over the functions of :mod:`timm_selfconv.layers.axis_scores`:

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

from timm.layers import register_notrace_module, resample_abs_pos_embed_nhwc, trunc_normal_

from .axis_scores import around_nearest, at_least_float32, axis_offsets, check_reach, finite, gaussian_axis_scores, \
    precision_matrices, relative_table, resample_table, sinusoids

__all__ = ['AbsoluteEncoding', 'LearnedEncoding', 'QuadraticEncoding', 'select_parameter']


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
        """Precision of each head, at least float32, shape (heads, 2, 2)."""
        precision, numbers = precision_matrices(self.spreads), self.col_numbers
        if numbers is not None:
            along = torch.tensor([numbers.shape[0], 1], device=precision.device, dtype=precision.dtype)
            precision = precision[:, :1, :1] * along[:, None] * along
        return precision

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
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Scores of the terms that know positions, split by axis, up to a constant per query.

        Args:
            query: Scaled queries, shape (B, heads, Q, W, head_dim); needed by the content-position term only.
            height: Number of rows H.
            width: Number of columns W.
            first: First row of queries.
            last: The row after their last; all H by default. There are Q of them.

        Returns:
            Row scores, (B or 1, heads, Q, W or 1, H), column scores, (B or 1, heads, Q or 1, W, W), and, for a full
            precision, what couples the axes, (B or 1, heads, Q, W, H, W); key axes last.
        """
        numbers = self.col_numbers
        if numbers is not None:
            check_reach(numbers, width)
        like = self.centers if self.position else self.query_weight
        d1, d2 = axis_offsets(height, like)[first:last], axis_offsets(width, like)
        rows, cols = torch.zeros_like(d1)[None, None, :, None], torch.zeros_like(d2)[None, None, None]
        cross: Optional[torch.Tensor] = None
        if self.position:
            precision = self.precisions()
            rows = gaussian_axis_scores(self.centers[:, 0], precision[:, 0, 0], height)[None, :, first:last, None, :]
            cols = gaussian_axis_scores(self.centers[:, 1], precision[:, 1, 1], width)[None, :, None, :, :]
            if self.full:
                a1, g1 = around_nearest(self.centers[:, 0], height)
                a1, g1 = a1[None, :, first:last, None, :], g1[None, :, first:last, None, :]
                a2, g2 = around_nearest(self.centers[:, 1], width)
                a2, g2 = a2[None, :, None, :, :], g2[None, :, None, :, :]
                coupling = finite(precision[:, 0, 1])[:, None, None, None]
                # (a1 + g1) (a2 + g2) without what is the same for all keys
                rows, cols = rows - coupling * a1 * g2, cols - coupling * a2 * g1
                cross = -(coupling * a1)[..., :, None] * a2[..., None, :]
        if self.content_position:
            assert query is not None
            weights = at_least_float32(torch.einsum('bhijd,hdp->bhijp', query, self.query_weight))
            squares = 2 if self.full else 1  # an isotropic encoding has one weight for both
            rows = rows + weights[..., :1] * d1.square()[:, None] + weights[..., squares:squares + 1] * d1[:, None]
            cols = cols + weights[..., squares - 1:squares] * d2.square() + weights[..., squares + 1:squares + 2] * d2
            if self.full:
                product = weights[..., 4, None, None] * d1[:, None, :, None] * d2[None, :, None, :]
                cross = product if cross is None else cross + product
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

    def axis_scores(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """The position term of every row offset and of every column offset, shape (offsets, heads)."""
        # sums of products: autocast would run a matrix product in half precision
        rows = (at_least_float32(self.row_table)[:, None] * at_least_float32(self.row_keys)).sum(-1)
        cols = (at_least_float32(self.col_table)[:, None] * at_least_float32(self.col_keys)).sum(-1)
        return rows, cols

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
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Scores of the terms that know positions, split by axis; see :meth:`QuadraticEncoding.forward`."""
        rows = torch.zeros(1, 1, height, 1, height, device=self.row_table.device)[:, :, first:last]
        cols = torch.zeros(1, 1, 1, width, width, device=self.col_table.device)
        if self.position:
            row_scores, col_scores = self.axis_scores()
            rows = relative_table(row_scores, height).permute(2, 0, 1)[None, :, first:last, None, :]
            cols = relative_table(col_scores, width).permute(2, 0, 1)[None, :, None, :, :]
        if self.content_position:
            assert query is not None
            half = query.shape[-1] // 2
            row_table, col_table = relative_table(self.row_table, height), relative_table(self.col_table, width)
            rows = rows + torch.einsum('bhijd,ikd->bhijk', query[..., :half], row_table[first:last])
            cols = cols + torch.einsum('bhijd,jld->bhijl', query[..., half:], col_table)
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
