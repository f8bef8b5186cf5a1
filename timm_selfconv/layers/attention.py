"""Multi-head self-attention on a grid of pixels."""
import copy
from typing import Any, Final, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, to_2tuple, trunc_normal_, use_fused_attn

from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding
from .functional import axis_probs, dense_scores, gather_by_factors, gather_by_maps, gather_fused, \
    maps_of_factors, prefers_maps, prefers_scores, rows_at_once
from .parameters import ABSOLUTE, check_dense, check_sizes, check_terms, select_parameter

__all__ = ['SelfAttention2d']


@torch.fx.wrap
@register_notrace_function
def check_input(x: torch.Tensor, dim: int, key: Optional[torch.Tensor] = None, heads: int = 0) -> torch.Tensor:
    """Return x, or raise a ValueError if its shape is not (B, H, W, dim), or if keys do not fit it."""
    if x.dim() != 4 or x.shape[3] != dim or x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(f'x of shape {list(x.shape)}: needs shape (B, H, W, {dim}), H and W of at least 1')
    wanted = [heads, x.shape[1] * x.shape[2], dim]
    if key is not None and (list(key.shape[1:]) != wanted or (key.shape[0] != x.shape[0] and key.shape[0] != 1)):
        raise ValueError(f'key of shape {list(key.shape)}: needs keys of {x.shape[0]} images or 1, of shape {wanted}; '
                         'only layers with content or key_bias have keys')
    return x


class SelfAttention2d(nn.Module):
    """Multi-head self-attention on a grid of pixels with relative or absolute position encoding.

    With ``delta = k - q`` the offset of a key from a query, head h scores (equation 8)

        A[q, k] = (x_q Wq Wk' x_k  +  x_q Wq r_delta  +  u Wk' x_k) / sqrt(D)  +  v r_delta
                   content            content_position   key_bias                 position

    and the layer returns ``sum_h softmax(A_h) X W_h`` (equations 1 and 4), followed by one more Linear. Every head has
    as many channels as the layer, because the theorem gives min(D_h, D_out) output channels.

    Separable position scores use row and column factors. Content with many pixels uses torch's fused attention. All
    other cases make an explicit map, softmax and then ``attn_drop``. So does dropout of position scores, a hook on
    ``attn_drop``, or ``fused_attn = False``.
    """
    absolute: Final[bool]
    relative: Final[bool]
    separable: Final[bool]
    coupled: Final[bool]

    def __init__(
            self,
            dim: int,
            num_heads: int = 9,
            terms: Sequence[str] = ('position',),
            encoding: str = 'quadratic',
            grid_size: Union[int, Tuple[int, int]] = (16, 16),
            qk_bias: bool = True,
            proj: bool = True,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            dim: Channels of the input, of every head and of the output.
            num_heads: Number of heads.
            terms: Terms of equation (8), any of :data:`TERMS`.
            encoding: One of :data:`ENCODINGS`: relative ('quadratic', 'quadratic_gen' with a full precision per head,
                'learned') or absolute ('sinusoid', 'absolute' for learned vectors; equation 3).
            grid_size: Rows and columns of the input, or one number for both; for learned encodings.
            qk_bias: Add a bias to queries and keys.
            proj: Add a second Linear after the values, as in the paper.
            attn_drop: Dropout rate of the attention probabilities.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If an argument is out of range or the encoding does not support the terms.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        grid: Tuple[int, int] = to_2tuple(grid_size)
        check_sizes(dim=dim, num_heads=num_heads, rows=grid[0], columns=grid[1])

        self.terms = terms = check_terms(terms, encoding)
        self.kind = encoding
        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.absolute = encoding in ABSOLUTE
        self.relative = 'position' in terms or 'content_position' in terms
        self.separable = terms == ('position',) and encoding != 'quadratic_gen'
        self.coupled = self.relative and encoding == 'quadratic_gen'  # a score that couples rows and columns
        has_query = 'content' in terms or 'content_position' in terms
        has_key = 'content' in terms or 'key_bias' in terms

        self.encoding: Any = None
        if self.absolute:
            self.encoding = AbsoluteEncoding(dim, grid, learned=encoding == 'absolute', **dd)
        elif self.relative:
            kept = dict(position='position' in terms, content_position='content_position' in terms)
            if encoding == 'learned':
                self.encoding = LearnedEncoding(num_heads, dim, grid, **kept, **dd)
            else:
                self.encoding = QuadraticEncoding(num_heads, dim, full=encoding == 'quadratic_gen', **kept, **dd)
        self.query = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_query else None
        self.key = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_key else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd)) if 'key_bias' in terms else None
        self.fused_attn = use_fused_attn()
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd) if proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the key bias; submodules initialise themselves."""
        if self.key_bias is not None:
            trunc_normal_(self.key_bias, std=0.02)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return keys of x, shape (B, heads, H W, dim), or raise a ValueError if the terms need none."""
        if self.key is None:
            raise ValueError(f'terms={self.terms}: only layers with content or key_bias have keys')
        x = check_input(x, self.dim)
        key = self.key(self.encoding(x) if self.absolute else x)
        return key.view(x.shape[0], x.shape[1] * x.shape[2], self.num_heads, self.dim).transpose(1, 2)

    @torch.jit.unused
    def fuse(self) -> 'SelfAttention2d':
        """Return a copy for inference with ``proj`` merged into ``value``. timm's `reparameterize_model` calls this.

        Returns:
            The copy, in eval mode, with frozen parameters.

        Raises:
            ValueError: If ``value`` or ``proj`` is wrapped, parametrised or hooked.
        """
        check_dense(self, ('value', 'proj'))
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        if isinstance(fused.proj, nn.Linear):
            # in float64 on the CPU, because some devices lack it
            first, bias, second, last = (
                p.detach().cpu().double() for layer in (fused.value, fused.proj) for p in (layer.weight, layer.bias))
            fused.value.weight.copy_(second @ first)
            fused.value.bias.copy_(second @ bias + last)
            fused.proj = nn.Identity()
        return fused

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Keep these heads, in this order, or raise a ValueError. Remove the parameters of the others."""
        if len(heads) == 0 or not set(heads) <= set(range(self.num_heads)):
            raise ValueError(f'heads={list(heads)}: needs one or more heads from 0 to {self.num_heads - 1}')
        index = torch.tensor(heads)
        channels = (index[:, None] * self.dim + torch.arange(self.dim)).flatten()
        if self.relative:
            self.encoding.keep_heads(index)
        for linear in (self.query, self.key):
            if linear is not None:
                select_parameter(linear, 'weight', channels)
                select_parameter(linear, 'bias', channels)
                linear.out_features = len(channels)
        select_parameter(self.value, 'weight', channels, dim=1)
        self.value.in_features = len(channels)
        select_parameter(self, 'key_bias', index)
        self.num_heads = len(heads)

    def score_parts(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            queries: Optional[torch.Tensor] = None,
    ) -> Tuple[
            Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor],
            Optional[torch.Tensor]]:
        """Compute the arguments of :func:`~timm_selfconv.layers.functional.dense_scores`.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys that replace the keys of x, see :meth:`keys`.
            queries: Rows of the queries, shape (Q,); default: all H.

        Returns:
            Queries over sqrt(D) plus ``u``, shape (B, heads, Q, W, dim), and keys, (B, heads, H W, dim), or None
            without content and key bias. Then row, column and coupled scores, or None.
        """
        height, width = x.shape[1], x.shape[2]
        query: Optional[torch.Tensor] = None
        content: Optional[torch.Tensor] = None
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.absolute:
            x = self.encoding(x)
        if self.key is not None and key is None:
            key = self.key(x).view(x.shape[0], height * width, self.num_heads, self.dim).transpose(1, 2)  # as keys()
        if queries is not None:
            x = x.index_select(1, queries)
        if self.query is not None:
            query = self.query(x).unflatten(3, [self.num_heads, self.dim]).permute(0, 3, 1, 2, 4) * self.scale
        if self.relative:
            rows, cols, cross = self.encoding(query, height, width, queries)
        if 'content' in self.terms:
            content = query
        if self.key_bias is not None:
            assert key is not None
            key_bias = self.key_bias[:, None, None].to(key.dtype) * self.scale
            content = key_bias.expand(x.shape[0], -1, x.shape[1], width, -1) if content is None else content + key_bias
        return content, key, rows, cols, cross

    def attention_probs(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return attention probabilities. They do not depend on the formula that the forward pass uses.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys that replace the keys of x, see :meth:`keys`.

        Returns:
            Probabilities before dropout, at least float32, shape (B, heads, H, W, H, W), query before key. Without
            content they are expanded over the batch, not copied.

        Raises:
            ValueError: If x or key has the wrong shape.
        """
        batch, height, width, _ = check_input(x, self.dim, key, 0 if self.key is None else self.num_heads).shape
        query, key, rows, cols, cross = self.score_parts(x, key)
        probs = dense_scores(query, key, rows, cols, cross).softmax(dim=-1)
        probs = probs.view(probs.shape[0], self.num_heads, height, width, height, width)
        return probs.expand(batch, -1, -1, -1, -1, -1)

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Map x, shape (B, H, W, dim), to the same shape. ``key`` replaces the keys of x, see :meth:`keys`.

        Raises:
            ValueError: If x or key has the wrong shape.
        """
        x = check_input(x, self.dim, key, 0 if self.key is None else self.num_heads)
        explicit = not self.fused_attn
        if not torch.jit.is_scripting():
            # profilers hook all modules, and need no map
            explicit = explicit or len(self.attn_drop._forward_hooks) > len(self.proj_drop._forward_hooks)
        if self.separable and not explicit and not (self.training and self.attn_drop.p > 0.):
            rows, cols, _ = self.encoding(None, x.shape[1], x.shape[2])
            row_probs, col_probs = axis_probs(rows[0, :, :, 0]), axis_probs(cols[0, :, 0])
            if prefers_maps(x):
                gathered = gather_by_maps(maps_of_factors(row_probs, col_probs), x, x.shape[2])
            else:
                gathered = gather_by_factors(row_probs, col_probs, x)
            return self.proj_drop(self.proj(self.value(gathered)))

        chunks: List[Optional[torch.Tensor]] = [None]  # None: all rows of queries
        if not torch.jit.is_scripting():
            if self.coupled and not explicit:
                chunks = rows_at_once(x, self.num_heads * (1 if self.key is None else len(x)))
        parts: List[torch.Tensor] = []
        for queries in chunks:
            query, keys, rows, cols, cross = self.score_parts(x, key, queries)
            if not (explicit or query is None or keys is None or self.coupled) and not prefers_scores(query, keys):
                gathered = gather_fused(query, keys, x, rows, cols, self.attn_drop.p if self.training else 0.)
            else:
                attn = dense_scores(query, keys, rows, cols, cross)
                attn = attn.softmax(dim=-1)
                attn = self.attn_drop(attn)
                gathered = gather_by_maps(attn, x, x.shape[2])
            parts.append(gathered)
        gathered = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # torch.cat copies even one
        return self.proj_drop(self.proj(self.value(gathered)))
