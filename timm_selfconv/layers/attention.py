"""Multi-head self-attention over a pixel grid, every term of the paper's equation (8) in one module."""
from typing import TYPE_CHECKING, Final, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, trunc_normal_, use_fused_attn

from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding, at_least_float32, select_parameter
from .separable import axis_probs, gather, separable_attention

__all__ = ['ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'SelfAttention2d', 'TERMS', 'dense_scores']

TERMS = ('content', 'content_position', 'key_bias', 'position')
RELATIVE = ('quadratic', 'quadratic_gen', 'learned')
ABSOLUTE = ('sinusoid', 'absolute')
ENCODINGS = RELATIVE + ABSOLUTE


def check_terms(terms: Sequence[str], encoding: str) -> Tuple[str, ...]:
    """Check that terms and encoding exist and fit each other, and return the terms as a tuple.

    Raises:
        ValueError: If they do not.
    """
    terms = (terms,) if isinstance(terms, str) else tuple(terms)
    if encoding not in ENCODINGS:
        raise ValueError(f'encoding={encoding!r}: needs one of {ENCODINGS}')
    if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(TERMS):
        raise ValueError(f'terms={terms!r}: needs one or more of {TERMS}, each once')
    if encoding in ABSOLUTE and terms != ('content',):
        raise ValueError(f"terms={terms!r}: encoding={encoding!r} is absolute and needs terms=('content',)")
    return terms


@torch.fx.wrap
@register_notrace_function
def dense_scores(rows: torch.Tensor, cols: torch.Tensor, cross: Optional[torch.Tensor]) -> torch.Tensor:
    """Scores of every query for every key from what the two axes give.

    Args:
        rows: Row scores, shape (B, heads, H, W or 1, H), query before key.
        cols: Column scores, shape (B, heads, H or 1, W, W).
        cross: What couples the axes, shape (B, heads, H, W, H, W), or None.

    Returns:
        Scores, shape (B, heads, H W, H W).
    """
    scores = rows[..., :, None] + cols[..., None, :]
    if cross is not None:
        scores = scores + cross
    return scores.flatten(4).flatten(2, 3)


@torch.fx.wrap
@register_notrace_function
def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: Optional[torch.Tensor],
        dropout_p: float,
) -> torch.Tensor:
    """torch's fused attention in the query's dtype; shapes (B, heads, H W, dim), bias (B or 1, heads, H W, H W)."""
    if bias is not None:
        bias = bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value.to(query.dtype), attn_mask=bias, dropout_p=dropout_p)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether weight and bias say all about a module: no other class in its place, no hook that waits for its call."""
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


class SelfAttention2d(nn.Module):
    """Multi-head self-attention on a grid of pixels with relative or absolute position encoding.

    With ``delta = k - q`` the offset of a key from a query, head h scores (equation 8)

        A[q, k] = (x_q Wq Wk' x_k  +  x_q Wq r_delta  +  u Wk' x_k) / sqrt(D)  +  v r_delta
                   content            content_position   key_bias                 position

    and the layer returns ``sum_h softmax(A_h) X W_h`` (equations 1 and 4) through one more linear map. Every head has
    as many channels as the layer: the paper's theorem gives min(D_h, D_out) output channels.

    Position-only attention with a separable encoding runs through its row and column factors; attention with content
    through ``scaled_dot_product_attention``. Both give way to an explicit map, softmax then ``attn_drop``, where that
    is asked for: ``fused_attn`` off, a hook on ``attn_drop``, or dropout of probabilities that have factors alone.
    """
    if TYPE_CHECKING:  # torchscript knows no modules of several kinds
        encoding: nn.Module
    fused_attn: bool
    absolute: Final[bool]
    relative: Final[bool]
    separable: Final[bool]
    has_query: Final[bool]
    has_key: Final[bool]
    has_key_bias: Final[bool]
    has_content: Final[bool]

    def __init__(
            self,
            dim: int,
            num_heads: int = 9,
            terms: Sequence[str] = ('position',),
            encoding: str = 'quadratic',
            grid_size: Tuple[int, int] = (16, 16),
            qk_bias: bool = True,
            proj: bool = True,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device=None,
            dtype=None,
    ):
        """
        Args:
            dim: Channels of the input, of every head and of the output.
            num_heads: Number of heads.
            terms: Which terms of equation (8) to keep, any of :data:`TERMS`.
            encoding: One of :data:`ENCODINGS`: relative ('quadratic', 'quadratic_gen' with a full precision a head,
                'learned') or absolute ('sinusoid', 'absolute' for learned vectors; equation 3).
            grid_size: Rows and columns of the input, which learned encodings are made for.
            qk_bias: Give the query and key maps a bias.
            proj: Send the heads' sum through one more linear map, as the paper does.
            attn_drop: Dropout rate of the attention probabilities.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If an argument is out of range or the terms do not fit the encoding.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        terms = check_terms(terms, encoding)
        if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f'num_heads={num_heads!r}: needs an integer of at least 1')

        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.fused_attn = use_fused_attn()
        self.absolute = encoding in ABSOLUTE
        self.relative = 'position' in terms or 'content_position' in terms
        self.separable = terms == ('position',) and encoding != 'quadratic_gen'
        self.has_query = 'content' in terms or 'content_position' in terms
        self.has_key = 'content' in terms or 'key_bias' in terms
        self.has_key_bias = 'key_bias' in terms
        self.has_content = 'content' in terms

        if self.absolute:
            self.encoding = AbsoluteEncoding(dim, grid_size, learned=encoding == 'absolute', **dd)
        elif self.relative:
            kept = dict(position='position' in terms, content_position='content_position' in terms)
            if encoding == 'learned':
                self.encoding = LearnedEncoding(num_heads, dim, grid_size, **kept, **dd)
            else:
                self.encoding = QuadraticEncoding(num_heads, dim, full=encoding == 'quadratic_gen', **kept, **dd)
        if self.has_query:
            self.query = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd)
        if self.has_key:
            self.key = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd)
        if self.has_key_bias:
            self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd) if proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Initialise what is this module's own; its parts initialise themselves."""
        if self.has_key_bias:
            trunc_normal_(self.key_bias, std=0.02)

    @torch.jit.ignore
    def keep_heads(self, heads: Sequence[int]) -> None:
        """Keep these heads, in this order, and drop the others with every parameter of theirs.

        The output loses what the others added to it, nothing else.
        """
        index = torch.tensor(heads)
        channels = (index[:, None] * self.dim + torch.arange(self.dim)).flatten()
        if self.relative:
            assert isinstance(self.encoding, (QuadraticEncoding, LearnedEncoding))
            self.encoding.keep_heads(index)
        for linear in (getattr(self, name) for name in ('query', 'key') if hasattr(self, name)):
            select_parameter(linear, 'weight', channels)
            select_parameter(linear, 'bias', channels)
            linear.out_features = len(channels)
        if self.has_key_bias:
            select_parameter(self, 'key_bias', index)
        select_parameter(self.value, 'weight', channels, dim=1)
        self.value.in_features = len(channels)
        self.num_heads = len(heads)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys of x, shape (B, H, W, dim): shape (B, heads, H W, dim). Only attention that looks at keys has them."""
        if self.absolute:
            x = self.encoding(x)
        return self.key(x).view(x.shape[0], -1, self.num_heads, self.dim).transpose(1, 2)

    def query_key_bias(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The scores' parts: ``scores = query key' / sqrt(D) + bias``.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to meet in the place of x's own, see :meth:`keys`.

        Returns:
            Queries with ``u`` added and keys, shape (B, heads, H W, dim), or None without content and key bias; the
            scores of the terms that know offsets, shape (B or 1, heads, H W, H W), or None without them.
        """
        batch, height, width, dim = x.shape
        if self.has_key and key is None:
            key = self.keys(x)
        if self.absolute:
            x = self.encoding(x)
        query: Optional[torch.Tensor] = None
        bias: Optional[torch.Tensor] = None
        if self.has_query:
            query = self.query(x).view(batch, height, width, self.num_heads, dim).permute(0, 3, 1, 2, 4)
        if self.relative:
            rows, cols, cross = self.encoding(None if query is None else query * self.scale, height, width)
            bias = dense_scores(rows, cols, cross)
        if self.has_key:
            assert key is not None
            if self.has_content and query is not None:
                query = query.flatten(2, 3)
                if self.has_key_bias:
                    query = query + self.key_bias[:, None].to(query.dtype)
            else:
                query = self.key_bias[:, None].to(key.dtype).expand(batch, -1, height * width, -1)
        return query, key, bias

    def scores(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Scores A of equation (8) for x, shape (B, H, W, dim): shape (B or 1, heads, H W, H W), query before key."""
        query, key, bias = self.query_key_bias(x, key)
        if self.has_key:
            assert query is not None and key is not None
            content = at_least_float32((query * self.scale) @ key.transpose(-2, -1))
            return content if bias is None else content + bias
        assert bias is not None
        return bias

    def attention_probs(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attention probabilities for an input, whatever path the forward takes.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to meet in the place of x's own, see :meth:`keys`.

        Returns:
            Probabilities before dropout, at least float32, shape (B, heads, H, W, H, W), query before key. Attention
            that does not look at content is expanded over the batch, not copied.
        """
        batch, height, width, _ = x.shape
        probs = self.scores(x, key).softmax(dim=-1)
        return probs.view(-1, self.num_heads, height, width, height, width).expand(batch, -1, -1, -1, -1, -1)

    def _through_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Values gathered by the probabilities of rows and of columns, dropout aside."""
        rows, cols, _ = self.encoding(None, x.shape[1], x.shape[2])
        row_probs, col_probs = axis_probs(rows[0, :, :, 0]), axis_probs(cols[0, :, 0])
        if not torch.jit.is_scripting():
            if is_plain_linear(self.value):
                return separable_attention(row_probs, col_probs, x, self.value.weight, self.value.bias)
        return self.value(gather(row_probs, col_probs, x).flatten(3))

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend, to keys given or x's own (see :meth:`keys`); x and the result have shape (B, H, W, dim)."""
        batch, height, width, dim = x.shape
        fused = self.fused_attn
        if not torch.jit.is_scripting():
            # who hooks this dropout wants to see the map, but not who hooks all modules, as profilers do
            hooked = bool(self.attn_drop._forward_hooks or self.attn_drop._forward_pre_hooks)
            fused = fused and (not hooked or bool(self.proj_drop._forward_hooks or self.proj_drop._forward_pre_hooks))
        drop = self.attn_drop.p if self.training else 0.

        if self.separable and fused and drop == 0.:
            return self.proj_drop(self.proj(self._through_factors(x)))
        if self.has_key and fused:
            query, key, bias = self.query_key_bias(x, key)
            assert query is not None and key is not None
            value = x.reshape(batch, 1, height * width, dim).expand(-1, self.num_heads, -1, -1)
            gathered = scaled_dot_product_attention(query, key, value, bias, drop).transpose(1, 2)
        else:
            attn = self.scores(x, key)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn).to(x.dtype)
            if self.has_query or self.has_key:
                gathered = (attn @ x.reshape(batch, 1, height * width, dim)).transpose(1, 2)
            else:  # one map serves all images: one matrix product for all heads
                gathered = torch.einsum('hqk,bkc->bqhc', attn[0], x.reshape(batch, height * width, dim))

        x = self.value(gathered.reshape(batch, height, width, self.num_heads * dim))
        x = self.proj(x)
        return self.proj_drop(x)
