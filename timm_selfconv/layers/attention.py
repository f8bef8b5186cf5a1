"""Multi-head self-attention over a pixel grid, every term of the paper's equation (8) in one module."""
import contextlib
import copy
from contextvars import ContextVar
from typing import Any, Final, Iterator, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, trunc_normal_, use_fused_attn

from .axis_scores import at_least_float32
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding, select_parameter
from .kernels import key_attention, map_attention, separable_attention
from .kernels.low_rank import low_rank_attention
from .kernels.maps import without_tiny
from .kernels.operators import gather_by_factors, gather_by_maps
from .kernels.windows import gaussian_windows
from .linear import apply_linear, autocast_dtype
from .onlookers import counted, hooked, must_be_plain, needs_operators, traced

__all__ = ['ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'SelfAttention2d', 'TERMS', 'dense_scores', 'explicit_maps']

TERMS = ('content', 'content_position', 'key_bias', 'position')
RELATIVE = ('quadratic', 'quadratic_gen', 'learned')
ABSOLUTE = ('sinusoid', 'absolute')
ENCODINGS = RELATIVE + ABSOLUTE
# bytes of scores of all heads that are held at once, where nothing asks for whole maps
CPU_MAP_BYTES = 2 ** 27
DEVICE_MAP_BYTES = 2 ** 28

_explicit = ContextVar('explicit_maps', default=False)


@contextlib.contextmanager
def explicit_maps() -> Iterator[None]:
    """Let SelfAttention2d layers make explicit maps meanwhile, in this thread (or task) alone."""
    token = _explicit.set(True)
    try:
        yield
    finally:
        _explicit.reset(token)


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
def check_grid(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x, or raise a ValueError if it is no grid of pixels with so many channels, channels last."""
    if x.dim() != 4 or x.shape[3] != dim or x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(f'x of shape {list(x.shape)}: needs shape (B, H, W, {dim}), H and W of at least 1')
    return x


@torch.fx.wrap
@register_notrace_function
def check_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x, or raise a TypeError if it has another dtype than a layer's weight, autocast aside."""
    if not torch.jit.is_scripting():  # it knows no autocast of a device
        if not x.is_floating_point() or autocast_dtype(x) != autocast_dtype(weight):
            raise TypeError(f"x of dtype {x.dtype}: needs the layer's, {weight.dtype}")
    return x


@torch.fx.wrap
@register_notrace_function
def axis_probs(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities of keys along one axis, shape (heads, queries, keys).

    A function, for who looks for whole maps in a graph looks for `softmax`.
    """
    return scores.softmax(dim=-1)


def from_largest(scores: torch.Tensor) -> torch.Tensor:
    """Scores of an axis without each query's largest: of one, it would swallow the other's, and half precision both."""
    return scores - scores.detach().amax(-1, keepdim=True)


@torch.fx.wrap
@register_notrace_function
def dense_scores(rows: torch.Tensor, cols: torch.Tensor, cross: Optional[torch.Tensor]) -> torch.Tensor:
    """Scores of every query for every key from what the two axes give.

    Args:
        rows: Row scores of Q rows of queries, shape (B, heads, Q, W or 1, H), query before key.
        cols: Column scores, shape (B, heads, Q or 1, W, W).
        cross: What couples the axes, shape (B, heads, Q, W, H, W), or None.

    Returns:
        Scores up to a constant per query, the largest of which is 0, shape (B, heads, Q W, H W).
    """
    rows, cols = from_largest(rows), from_largest(cols)
    scores = rows[..., :, None] + cols[..., None, :]
    if cross is not None:
        scores = scores + cross
        scores = scores - scores.detach().amax((-2, -1), keepdim=True)
    return scores.flatten(4).flatten(2, 3)


def rows_at_once(x: torch.Tensor, maps: int) -> int:
    """How many rows of queries fit the memory for scores, 0 for all; x of shape (B, H, W, C), so many maps of it."""
    if must_be_plain(x):
        return 0
    row = maps * x.shape[2] * x.shape[1] * x.shape[2] * torch.promote_types(x.dtype, torch.float32).itemsize
    fit = (CPU_MAP_BYTES if x.device.type == 'cpu' else DEVICE_MAP_BYTES) // max(1, row)
    return 0 if fit >= x.shape[1] else max(1, fit)


def plain_linear(layer: nn.Module, name: str) -> nn.Linear:
    """A layer's Linear, an adapter merged into it if it can be; the layer is not to be used any more.

    Raises:
        ValueError: If weight and bias do not say all of it.
    """
    merge, base = getattr(layer, 'merge', None), getattr(layer, 'base_layer', None)
    if callable(merge) and isinstance(base, nn.Linear) and not hooked(layer):
        x = torch.ones(1, base.in_features).to(base.weight)
        with torch.no_grad():
            wanted = layer(x)
            merge()
            if not torch.allclose(base(x), wanted, rtol=1e-2, atol=1e-2):  # of an adapter that is switched off
                raise ValueError(f'{name} is a {type(layer).__name__}: computes something else once it is merged')
        layer = base
    if type(layer) is not nn.Linear or hooked(layer) or 'forward' in vars(layer):
        raise ValueError(
            f'{name} is a {type(layer).__name__}{" with hooks" if hooked(layer) else ""}: needs a torch.nn.Linear '
            'without hooks or parametrisations to be folded, or an adapter with `merge`')
    return layer


class SelfAttention2d(nn.Module):
    """Multi-head self-attention on a grid of pixels with relative or absolute position encoding.

    With ``delta = k - q`` the offset of a key from a query, head h scores (equation 8)

        A[q, k] = (x_q Wq Wk' x_k  +  x_q Wq r_delta  +  u Wk' x_k) / sqrt(D)  +  v r_delta
                   content            content_position   key_bias                 position

    and the layer returns ``sum_h softmax(A_h) X W_h`` (equations 1 and 4) through one more linear map. Every head has
    as many channels as the layer: the paper's theorem gives min(D_h, D_out) output channels.

    Position-only attention with a separable encoding runs through its row and column factors; attention with content
    without a tensor of all scores. Both give way to an explicit map, softmax then ``attn_drop``, where that
    is asked for: ``fused_attn`` off, a hook on ``attn_drop``, or dropout of probabilities that have factors alone.
    """
    fused_attn: bool
    absolute: Final[bool]
    relative: Final[bool]
    separable: Final[bool]

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
            encoding: One of :data:`ENCODINGS`: relative ('quadratic', 'quadratic_gen' with a full precision per head,
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

        self.terms = terms
        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.fused_attn = use_fused_attn()
        self.absolute = encoding in ABSOLUTE
        self.relative = 'position' in terms or 'content_position' in terms
        self.separable = terms == ('position',) and encoding != 'quadratic_gen'
        has_query = 'content' in terms or 'content_position' in terms
        has_key = 'content' in terms or 'key_bias' in terms

        module: Any = None
        if self.absolute:
            module = AbsoluteEncoding(dim, grid_size, learned=encoding == 'absolute', **dd)
        elif self.relative:
            kept = dict(position='position' in terms, content_position='content_position' in terms)
            if encoding == 'learned':
                module = LearnedEncoding(num_heads, dim, grid_size, **kept, **dd)
            else:
                module = QuadraticEncoding(num_heads, dim, full=encoding == 'quadratic_gen', **kept, **dd)
        self.encoding = module
        self.query = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_query else None
        self.key = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_key else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd)) if 'key_bias' in terms else None
        self.tolerance: Optional[float] = None  # see `fuse`
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd) if proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is this module's own; its parts initialise themselves."""
        if self.key_bias is not None:
            trunc_normal_(self.key_bias, std=0.02)

    @torch.jit.unused
    def fuse(self, tolerance: Optional[float] = None) -> 'SelfAttention2d':
        """A copy for inference, the Linear after the value product in it; timm's `reparameterize_model` calls this.

        Args:
            tolerance: What the attention map of each head may lose in operator norm, between 0 and 1, where rows and
                columns are separable. Heads run at a low rank where this is faster. None keeps all heads whole.

        Returns:
            The copy, in eval mode, its parameters frozen.

        Raises:
            ValueError: If the tolerance is out of range, or somebody waits for what is folded: an adapter that does not
                merge, a parametrisation or a hook.
        """
        if tolerance is not None and (isinstance(tolerance, bool) or not 0. < tolerance < 1.):
            raise ValueError(f'tolerance={tolerance!r}: needs a number between 0 and 1, or None')
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        fused.value = value = plain_linear(fused.value, 'value')
        if type(fused.proj) is not nn.Identity or hooked(fused.proj):
            proj = plain_linear(fused.proj, 'proj')
            # in float64, which not every device has
            first, bias, second, last = (
                p.detach().cpu().double() for p in (value.weight, value.bias, proj.weight, proj.bias))
            value.weight = nn.Parameter((second @ first).to(value.weight), False)
            value.bias = nn.Parameter((second @ bias + last).to(value.bias), False)
        fused.proj = nn.Identity()
        fused.tolerance = tolerance
        return fused

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Keep these heads, in this order, and drop the others with every parameter of theirs.

        The output loses what the others added to it, nothing else.
        """
        index = torch.tensor(heads)
        channels = (index[:, None] * self.dim + torch.arange(self.dim)).flatten()
        if self.relative:
            self.encoding.keep_heads(index)
        for linear in (self.query, self.key):
            if linear is not None:
                select_parameter(linear, 'weight', channels)
                select_parameter(linear, 'bias', channels)
                linear.out_features = len(channels)
        if self.key_bias is not None:
            select_parameter(self, 'key_bias', index)
        select_parameter(self.value, 'weight', channels, dim=1)
        self.value.in_features = len(channels)
        self.num_heads = len(heads)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys of x, shape (B, H, W, dim): shape (B, heads, H W, dim). Only attention that looks at keys has them."""
        assert self.key is not None
        if self.absolute:
            x = self.encoding(x)
        if torch.jit.is_scripting():
            key = self.key(x)
        else:  # torchscript compiles what follows a return, but not an else
            key = apply_linear(self.key, x)
        return key.view(x.shape[0], x.shape[1] * x.shape[2], self.num_heads, self.dim).transpose(1, 2)

    def score_parts(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[
            Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor],
            Optional[torch.Tensor]]:
        """The scores' parts, ``query key' + rows + cols + cross`` up to a constant per query.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to meet in the place of x's own, see :meth:`keys`.
            first: First row of queries.
            last: The row after their last; all H by default. There are Q of them.

        Returns:
            Queries over sqrt(D) with ``u`` added, shape (B, heads, Q, W, dim), and keys, (B, heads, H W, dim), or None
            without content and key bias; scores of the terms that know offsets, as encodings give them, or None.
        """
        batch, height, width, dim = x.shape
        if self.key is not None and key is None:
            key = self.keys(x)
        if self.absolute:
            x = self.encoding(x)
        x = x[:, first:last]
        query: Optional[torch.Tensor] = None
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.query is not None:
            if torch.jit.is_scripting():
                query = self.query(x)
            else:
                query = apply_linear(self.query, x)
            query = query.view(batch, x.shape[1], width, self.num_heads, dim).permute(0, 3, 1, 2, 4) * self.scale
        if self.relative:
            rows, cols, cross = self.encoding(query, height, width, first, last)
        if self.key is not None:
            assert key is not None
            if self.key_bias is not None:
                key_bias = self.key_bias[:, None, None].to(key.dtype) * self.scale
                if 'content' in self.terms and query is not None:
                    query = query + key_bias
                else:
                    query = key_bias.expand(batch, -1, x.shape[1], width, -1)
        else:
            query = None
        return query, key, rows, cols, cross

    def query_key_bias(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The scores as ``query key' + bias``, up to a constant per query.

        Arguments, queries and keys are those of :meth:`score_parts`; the bias has the largest score of each query 0 and
        shape (B or 1, heads, Q W, H W).
        """
        query, key, rows, cols, cross = self.score_parts(x, key, first, last)
        bias: Optional[torch.Tensor] = None
        if rows is not None and cols is not None:
            bias = dense_scores(rows, cols, cross)
        return query, key, bias

    def scores(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> torch.Tensor:
        """Scores A of equation (8) up to a constant per query: shape (B or 1, heads, Q W, H W), query before key.

        Arguments are those of :meth:`score_parts`.
        """
        query, key, bias = self.query_key_bias(x, key, first, last)
        if query is not None and key is not None:
            content = at_least_float32(query.flatten(2, 3) @ key.transpose(-2, -1))
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
        probs = probs.view(probs.shape[0], self.num_heads, height, width, height, width)
        return probs.expand(batch, -1, -1, -1, -1, -1)

    def _choose_path(self, x: torch.Tensor) -> Tuple[str, int]:
        """How x goes through: by 'factors', 'keys', 'windows' or a 'map', and rows of queries at once (0: all).

        Whole maps are for who asks: by timm's switch, :func:`explicit_maps` or a hook on ``attn_drop``. Factors have no
        probabilities to drop, nor have keys on a CPU.
        """
        if torch.jit.is_scripting():
            return ('factors' if self.separable and self.fused_attn and not self._drops() else 'map'), 0
        else:  # torchscript compiles what follows a return, but not an else
            # who hooks this dropout wants to see the map, but not who hooks all modules, as profilers do
            if not self.fused_attn or _explicit.get() or (hooked(self.attn_drop) and not hooked(self.proj_drop)):
                return 'map', 0
            if self.separable and not self._drops():
                return 'factors', 0
            if self.key is None:
                rows = rows_at_once(x, self.num_heads * (1 if self.terms == ('position',) else x.shape[0]))
                # windows rest on numbers: read back from a device they would cost more than they save
                known = rows > 0 and x.device.type == 'cpu' and not counted()
                return ('windows' if known and self.terms == ('position',) and not self.separable else 'map'), rows
            rows = rows_at_once(x, self.num_heads * x.shape[0])
            coupled = self.relative and getattr(self.encoding, 'full', False)
            dropped = self._drops() and (needs_operators(x) or x.device.type == 'cpu')
            return ('map' if coupled or dropped else 'keys'), rows

    def _drops(self) -> bool:
        """Whether probabilities are dropped."""
        return self.training and self.attn_drop.p > 0.

    @torch.jit.unused
    def _plain_values(self) -> bool:
        """Whether weight and bias say all of the value map."""
        return type(self.value) is nn.Linear and not hooked(self.value)

    def _apply_values(self, gathered: torch.Tensor) -> torch.Tensor:
        """Values of what all heads gather, shape (..., heads dim): shape (..., dim)."""
        if torch.jit.is_scripting():
            gathered = self.value(gathered)
        else:
            gathered = apply_linear(self.value, gathered)
        return gathered

    def _through_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Values gathered by the probabilities of rows and of columns, shape (B, H, W, dim)."""
        rows, cols, _ = self.encoding(None, x.shape[1], x.shape[2])
        row_probs, col_probs = axis_probs(rows[0, :, :, 0]), axis_probs(cols[0, :, 0])
        if not torch.jit.is_scripting():
            if self._plain_values():
                if self.tolerance is not None and not traced(x):
                    return low_rank_attention(
                        row_probs, col_probs, x, self.value.weight, self.value.bias, self.tolerance)
                return separable_attention(row_probs, col_probs, x, self.value.weight, self.value.bias)
        return self._apply_values(gather_by_factors(row_probs, col_probs, x).flatten(3))

    @torch.jit.unused
    def _through_keys(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """What each head gathers for these rows of queries without a tensor of scores, shape (B, Q W, heads, dim)."""
        query, key, rows, cols, _ = self.score_parts(x, key, first, last)
        assert query is not None and key is not None
        if rows is not None and cols is not None:
            rows, cols = from_largest(rows), from_largest(cols)
        value = x.flatten(1, 2)[:, None]
        return key_attention(query, key, value, rows, cols, self.attn_drop.p if self.training else 0.)

    def _through_map(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """Values gathered by an explicit map of these rows of queries, shape (B, Q W, dim)."""
        attn = self.scores(x, key, first, last)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        if self.terms == ('position',):
            if not torch.jit.is_scripting():
                if self._plain_values():
                    return map_attention(attn[0], x, self.value.weight, self.value.bias)
            gathered = gather_by_maps(attn[0], x)
        else:
            gathered = (attn.to(x.dtype) @ x.flatten(1, 2)[:, None]).transpose(1, 2)
        return self._apply_values(gathered.flatten(2))

    @torch.jit.unused
    def _through_windows(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """What each Gaussian head gathers for these rows of queries in its window, shape (B, Q W, heads, dim)."""
        return torch.stack([
            without_tiny(self.attn_drop(probs), x.dtype) @ x[:, i:j].flatten(1, 2) for probs, i, j in gaussian_windows(
                self.encoding.centers, self.encoding.spreads, x.shape[1], x.shape[2], first, last)], dim=2)

    def _values(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            path: str,
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """Values of what these rows of queries gather, shape (B, Q, W, dim)."""
        if path == 'keys':
            values = self._apply_values(self._through_keys(x, key, first, last).flatten(2))
        elif path == 'windows' and last is not None:
            values = self._apply_values(self._through_windows(x, first, last).flatten(2))
        else:
            values = self._through_map(x, key, first, last)
        return values.unflatten(1, [-1, x.shape[2]])

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend, to keys given or x's own (see :meth:`keys`); x and the result have shape (B, H, W, dim).

        Raises:
            ValueError: If x has another shape.
            TypeError: If x has another dtype than the layer's weights.
        """
        x = check_grid(x, self.dim)
        if not torch.jit.is_scripting():
            if type(self.value) is nn.Linear:
                x = check_dtype(x, self.value.weight)
        path, rows = self._choose_path(x)
        if self.separable and path == 'factors':
            x = self._through_factors(x)
        elif rows == 0:
            x = self._values(x, key, path, 0, None)
        else:
            if self.key is not None and key is None:
                key = self.keys(x)
            parts = [self._values(x, key, path, first, first + rows) for first in range(0, x.shape[1], rows)]
            x = torch.cat(parts, dim=1)
        if torch.jit.is_scripting():
            x = self.proj(x)
        else:
            x = apply_linear(self.proj, x)
        return self.proj_drop(x)
