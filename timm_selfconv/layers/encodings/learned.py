"""Learned relative encoding: a table of row offsets and a table of column offsets (Ramachandran et al., 2019)."""
from typing import Any, TYPE_CHECKING, Final, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, register_notrace_module

from ..functional import at_least_float32
from ..parameters import select_parameter

__all__ = ['LearnedEncoding', 'relative_table', 'resample_table']


@torch.fx.wrap
@register_notrace_function
def relative_table(table: torch.Tensor, size: int, queries: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Look up the row of an offset table for every query and key of one axis.

    Args:
        table: One row per offset, from ``-(reach - 1)`` to ``reach - 1``, shape (2 reach - 1, dim).
        size: Number of keys along the axis.
        queries: Positions of the queries, shape (queries,); default: all keys.

    Returns:
        Encodings, shape (queries, size, dim), query before key.

    Raises:
        ValueError: If the table is too small for the axis.
    """
    reach = (table.shape[0] + 1) // 2
    if size > reach:
        raise ValueError(
            f'the input has {size} positions along an axis, but the encoding reaches {reach}: '
            'create the model with a larger img_size or call set_input_size(img_size=...)')
    positions = torch.arange(size, device=table.device)
    return table[positions[None, :] - (positions if queries is None else queries)[:, None] + reach - 1]


def resample_table(table: torch.Tensor, reach: int) -> torch.Tensor:
    """Resample an offset table, shape (2 old_reach - 1, dim), to (2 reach - 1, dim) for an axis of ``reach`` positions.

    Offsets scale with the image. The zero offset stays in the middle.
    """
    length = 2 * reach - 1
    if table.shape[0] == length:
        return table
    resampled = F.interpolate(at_least_float32(table).T[None], size=length, mode='linear', align_corners=True)
    return resampled[0].T.to(table.dtype).contiguous()


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
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            num_heads: Number of heads.
            head_dim: Channels of a query. The tables have as many, or half as many each with ``content_position``: the
                first half of a query is scored against the row table, the second against the column table.
            grid_size: Rows and columns of the largest input.
            position: Keep the position term, ``v r_delta``.
            content_position: Keep the content-position term, ``x_q Wq r_delta``.

        Raises:
            ValueError: If head_dim is odd, with ``content_position``.
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
        """Initialise tables by N(0, 1) and keys uniformly in +-1 / sqrt(dim), as the released code does."""
        nn.init.normal_(self.row_table)
        nn.init.normal_(self.col_table)
        if self.position:
            bound = self.row_table.shape[1] ** -0.5
            nn.init.uniform_(self.row_keys, -bound, bound)
            nn.init.uniform_(self.col_keys, -bound, bound)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Resample the tables for other (rows, columns)."""
        for name, reach in (('row_table', grid_size[0]), ('col_table', grid_size[1])):
            table = getattr(self, name)
            setattr(self, name, nn.Parameter(resample_table(table.detach(), reach), table.requires_grad))

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep the keys of these heads, shape (n,). All heads share the tables."""
        for name in ('row_keys', 'col_keys'):
            select_parameter(self, name, heads)

    def offset_tables(self, height: int, width: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the position term of equation (8) by offset; see :meth:`QuadraticEncoding.offset_tables`.

        Raises:
            ValueError: If a table is too small.
        """
        tables = []
        for table, keys, size in ((self.row_table, self.row_keys, height), (self.col_table, self.col_keys, width)):
            from_last, from_first = relative_table(table.cpu().double(), size, torch.tensor([size - 1, 0]))
            tables.append(keys.cpu().double() @ torch.cat([from_last, from_first[1:]]).T)
        return tables[0], tables[1], tables[0].new_zeros(len(tables[0]))

    def forward(
            self,
            query: Optional[torch.Tensor],
            height: int,
            width: int,
            queries: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Return row and column scores; see :meth:`QuadraticEncoding.forward`."""
        dtype = torch.promote_types(self.row_table.dtype, torch.float32)
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        if self.position:
            # no matrix product, which autocast would run in half precision
            row_scores = (self.row_table.to(dtype)[:, None] * self.row_keys).sum(-1)
            col_scores = (self.col_table.to(dtype)[:, None] * self.col_keys).sum(-1)
            rows = relative_table(row_scores, height, queries).permute(2, 0, 1)[None, :, :, None]
            cols = relative_table(col_scores, width).permute(2, 0, 1)[None, :, None]
        if self.content_position:
            assert query is not None
            of_row, of_col = query.chunk(2, -1)
            row_table = relative_table(self.row_table, height, queries)
            of_rows = torch.einsum('bhijd,ikd->bhijk', of_row, row_table).to(dtype)
            col_table = relative_table(self.col_table, width)
            of_cols = torch.einsum('bhijd,jld->bhijl', of_col, col_table).to(dtype)
            rows = of_rows if rows is None else rows + of_rows
            cols = of_cols if cols is None else cols + of_cols
        assert rows is not None and cols is not None
        return rows, cols, None
