"""Multi-head self-attention over a pixel grid: scores to probabilities to values, by the fastest path."""
from typing import Any, Final, List, Optional, Sequence, Tuple, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, trunc_normal_, use_fused_attn

from .adapters import plain_copy
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding
from .encodings.windows import gaussian_windows
from .kernels import key_attention, map_attention, pixel_attention, separable_attention
from .kernels.kernel import TINY, computed_by, hooked, kernel_dtype, switches
from .kernels.positions import axis_probs, dense_scores, gather_by_factors, gather_by_maps
from .parameters import ABSOLUTE, check_sizes, check_terms, head_channels, select_inputs, select_parameter
from .values import HeadValues

__all__ = ['SelfAttention2d']

# bytes of scores of all heads that are held at once, where nothing asks for whole maps
CPU_MAP_BYTES = 2 ** 27
DEVICE_MAP_BYTES = 2 ** 28


@torch.fx.wrap
@register_notrace_function
def check_input(x: torch.Tensor, dim: int, weight: Optional[torch.Tensor]) -> torch.Tensor:
    """Return x, shape (B, H, W, dim), of the dtype that a layer's weight, if given, has outside of autocast.

    Raises:
        ValueError: If x has another shape.
        TypeError: If it has another dtype.
    """
    if x.dim() != 4 or x.shape[3] != dim or x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(f'x of shape {list(x.shape)}: needs shape (B, H, W, {dim}), H and W of at least 1')
    if not torch.jit.is_scripting():  # it lacks autocast of a device
        if weight is not None and x.dtype != weight.dtype and not (
                x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)
                and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(x.device.type))
                and torch.is_autocast_enabled(x.device.type)):
            raise TypeError(f"x of dtype {x.dtype}: needs the layer's, {weight.dtype}")
    return x


class SelfAttention2d(nn.Module):
    """Multi-head self-attention on a grid of pixels with relative or absolute position encoding.

    With ``delta = k - q`` the offset of a key from a query, head h scores (equation 8)

        A[q, k] = (x_q Wq Wk' x_k  +  x_q Wq r_delta  +  u Wk' x_k) / sqrt(D)  +  v r_delta
                   content            content_position   key_bias                 position

    and the layer returns ``sum_h softmax(A_h) X W_h`` (equations 1 and 4) through one more linear map. Every head has
    as many channels as the layer: the paper's theorem gives min(D_h, D_out) output channels.

    Position-only attention with a separable encoding runs through its row and column factors; attention with content
    without a tensor of all scores. Both give way to an explicit map, softmax then ``attn_drop``, where that
    is asked for: ``fused_attn`` off, a hook on ``attn_drop``, or dropout of probabilities, on a CPU or where these have
    only factors.
    """
    absolute: Final[bool]
    relative: Final[bool]
    separable: Final[bool]
    pixel_keys: Final[bool]

    def __init__(
            self,
            dim: int,
            num_heads: int = 9,
            terms: Sequence[str] = ('position',),
            encoding: str = 'quadratic',
            grid_size: Tuple[int, int] = (16, 16),
            qk_bias: bool = True,
            proj: bool = True,
            head_dim: Optional[int] = None,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            dim: Channels of the input, of every head and of the output.
            num_heads: Number of heads.
            terms: Which terms of equation (8) to keep, any of :data:`TERMS`.
            encoding: One of :data:`ENCODINGS`: relative ('quadratic', 'quadratic_gen' with a full precision per head,
                'learned', 'line' of two dimensions) or absolute ('sinusoid', 'absolute' for learned vectors;
                equation 3).
            grid_size: Rows and columns of the input, which learned encodings and 'line' are made for.
            qk_bias: Give the query and key maps a bias.
            proj: Send the heads' sum through one more linear map, as the paper does.
            head_dim: Channels D_h of a head's values, dim by default: the rank of a head's map of a pixel, so that a
                convolution has at most so many output channels (the paper's remark on Theorem 1).
            attn_drop: Dropout rate of the attention probabilities.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If an argument is out of range or the terms do not fit the encoding.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        terms = check_terms(terms, encoding)
        check_sizes(dim=dim, num_heads=num_heads, head_dim=dim if head_dim is None else head_dim)

        self.terms = terms
        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.absolute = encoding in ABSOLUTE
        self.relative = 'position' in terms or 'content_position' in terms
        self.separable = terms == ('position',) and encoding in ('quadratic', 'learned')
        self.pixel_keys = 'content' in terms and ('content_position' not in terms or encoding == 'learned')
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
                line_width = grid_size[1] if encoding == 'line' else None
                module = QuadraticEncoding(
                    num_heads, dim, full=encoding == 'quadratic_gen', line_width=line_width, **kept, **dd)
        self.encoding = module
        self.query = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_query else None
        self.key = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_key else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd)) if 'key_bias' in terms else None
        self.fused_attn = use_fused_attn()
        self.attn_drop = nn.Dropout(attn_drop)
        self.value: Any = nn.Linear(num_heads * dim, dim, **dd) if head_dim is None else \
            HeadValues(num_heads, dim, head_dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd) if proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is this module's own; its parts initialise themselves."""
        if self.key_bias is not None:
            trunc_normal_(self.key_bias, std=0.02)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys of x, shape (B, H, W, dim): shape (B, heads, H W, dim). Only attention that looks at keys has them."""
        assert self.key is not None
        if self.absolute:
            x = self.encoding(x)
        return self.key(x).view(x.shape[0], x.shape[1] * x.shape[2], self.num_heads, self.dim).transpose(1, 2)

    @torch.jit.unused
    def fuse(self) -> 'SelfAttention2d':
        """A copy for inference, the Linear after the value product in it; timm's `reparameterize_model` calls this.

        Returns:
            The copy, in eval mode, its parameters frozen.

        Raises:
            ValueError: If what is folded has an adapter that does not merge, a parametrisation or a hook.
        """
        narrow = isinstance(self.value, HeadValues)
        fused = plain_copy(self, ('out' if narrow else 'value', 'proj')).eval().requires_grad_(False)
        if type(fused.proj) is not nn.Identity:
            value, proj = fused.value.out if narrow else fused.value, cast(nn.Linear, fused.proj)
            # in float64, which not every device has
            first, bias, second, last = (
                p.detach().cpu().double() for p in (value.weight, value.bias, proj.weight, proj.bias))
            value.weight = nn.Parameter((second @ first).to(value.weight), False)
            value.bias = nn.Parameter((second @ bias + last).to(value.bias), False)
            fused.proj = nn.Identity()
        return fused

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Keep these heads, in this order, and drop the others with every parameter of theirs.

        The output loses what the others added to it, nothing else.
        """
        index = torch.tensor(heads)
        channels = head_channels(index, self.dim)
        if self.relative:
            self.encoding.keep_heads(index)
        for linear in (self.query, self.key):
            if linear is not None:
                select_parameter(linear, 'weight', channels)
                select_parameter(linear, 'bias', channels)
                linear.out_features = len(channels)
        if isinstance(self.value, HeadValues):
            self.value.keep_heads(index)
        else:
            select_inputs(self.value, channels)
        if self.key_bias is not None:
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
        """The scores' parts, ``query key' + rows + cols + cross`` up to a constant per query.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to attend to in place of x's own, see :meth:`keys`.
            queries: Rows of the queries, shape (Q,); all H by default.

        Returns:
            Queries over sqrt(D) with ``u`` added, shape (B, heads, Q, W, dim), and keys, (B, heads, H W, dim), or None
            without content and key bias; scores of the terms in offsets, as encodings give them, or None.
        """
        height, width = x.shape[1], x.shape[2]
        query: Optional[torch.Tensor] = None
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.key is not None and key is None:
            key = self.keys(x)
        if self.absolute:
            x = self.encoding(x)
        if queries is not None:
            x = x.index_select(1, queries)
        if self.query is not None:
            query = self.query(x).unflatten(3, [self.num_heads, self.dim]).permute(0, 3, 1, 2, 4) * self.scale
        if self.relative:
            rows, cols, cross = self.encoding(query, height, width, queries)
        if self.key is None:
            query = None
        elif self.key_bias is not None:
            assert key is not None
            key_bias = self.key_bias[:, None, None].to(key.dtype) * self.scale
            if 'content' in self.terms and query is not None:
                query = query + key_bias
            else:
                query = key_bias.expand(x.shape[0], -1, x.shape[1], width, -1)
        return query, key, rows, cols, cross

    def attention_probs(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attention probabilities for an input, whatever path the forward takes.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to attend to in place of x's own, see :meth:`keys`.

        Returns:
            Probabilities before dropout, at least float32, shape (B, heads, H, W, H, W), query before key. Attention
            that does not look at content is expanded over the batch, not copied.

        Raises:
            ValueError: If x has another shape.
        """
        batch, height, width, _ = check_input(x, self.dim, None).shape
        query, key, rows, cols, cross = self.score_parts(x, key)
        probs = dense_scores(query, key, rows, cols, cross).softmax(dim=-1)
        probs = probs.view(probs.shape[0], self.num_heads, height, width, height, width)
        return probs.expand(batch, -1, -1, -1, -1, -1)

    def _by_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Attend by the probabilities of rows and of columns."""
        rows, cols, _ = self.encoding(None, x.shape[1], x.shape[2])
        row_probs, col_probs = axis_probs(rows[0, :, :, 0]), axis_probs(cols[0, :, 0])
        if not torch.jit.is_scripting():
            # hooks on the values need a call of the module
            if type(self.value) is nn.Linear and not hooked(self.value):
                return separable_attention(row_probs, col_probs, x, self.value.weight, self.value.bias)
        return self.value(gather_by_factors(row_probs, col_probs, x).flatten(3))

    def _by_map(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            queries: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Attend by an explicit map, for these rows of queries or all: shape (B, Q, W, dim)."""
        query, key, rows, cols, cross = self.score_parts(x, key, queries)
        attn = dense_scores(query, key, rows, cols, cross)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        if self.terms == ('position',):
            if not torch.jit.is_scripting():
                if type(self.value) is nn.Linear and not hooked(self.value):
                    values = map_attention(attn[0], x, self.value.weight, self.value.bias)
                    return values.unflatten(1, [-1, x.shape[2]])
            gathered = gather_by_maps(attn[0], x)
        else:
            gathered = (attn.to(x.dtype) @ x.flatten(1, 2)[:, None]).transpose(1, 2)
        return self.value(gathered.unflatten(1, [-1, x.shape[2]]).flatten(3))

    @torch.jit.unused
    def _by_keys(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            queries: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Attend without a tensor of scores, as :meth:`_by_map` does."""
        query, key, rows, cols, _ = self.score_parts(x, key, queries)
        assert query is not None and key is not None
        drop = self.attn_drop.p if self.training else 0.
        return self.value(key_attention(query, key, x.flatten(1, 2)[:, None], rows, cols, drop).flatten(3))

    @torch.jit.unused
    def _by_pixels(self, x: torch.Tensor, key: None, queries: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend to the pixels as :meth:`_by_map` does to keys, see :func:`pixel_attention`."""
        (_, height, width, dim), heads = x.shape, self.num_heads
        pixels = self.encoding(x) if self.absolute else x
        here = pixels if queries is None else pixels.index_select(1, queries)
        to_query: Any = self.query
        to_key: Any = self.key
        weight, key_weight = to_query.weight.view(heads, dim, dim) * self.scale, to_key.weight.view(heads, dim, dim)
        bias = weight.new_zeros(heads, dim) if to_query.bias is None else to_query.bias.view(heads, dim) * self.scale
        rows: Any = None
        cols: Any = None
        if self.relative:
            same = bias[None, :, None, None].expand(1, -1, here.shape[1], width, -1)
            rows, cols, _ = self.encoding(same, height, width, queries)
            if self.encoding.content_position:
                of_rows, of_cols = self.encoding.pixel_scores(here, weight, height, queries)
                rows, cols = rows + of_rows, cols + of_cols
        if self.key_bias is not None:
            bias = bias + self.key_bias * self.scale
        if to_key.bias is not None:  # it adds the same to all scores of a query: gradients of 0, but not none
            bias = bias + 0 * to_key.bias.view_as(bias)
        drop = self.attn_drop.p if self.training else 0.
        return self.value(pixel_attention(here, pixels, x, weight, bias, key_weight, rows, cols, drop).flatten(3))

    @torch.jit.unused
    def _by_windows(self, x: torch.Tensor, key: None, queries: torch.Tensor) -> torch.Tensor:
        """Attend, each Gaussian head within its window, as :meth:`_by_map` does."""
        gathered = torch.stack([
            F.threshold(self.attn_drop(probs).to(x.dtype), TINY, 0.) @ x[:, i:j].flatten(1, 2)
            for probs, i, j in gaussian_windows(
                self.encoding.centers, self.encoding.precisions(), x.shape[1], x.shape[2], queries)], dim=2)
        return self.value(gathered.unflatten(1, (-1, x.shape[2])).flatten(3))

    @torch.jit.unused
    def _by_rows(self, x: torch.Tensor, key: Optional[torch.Tensor], drops: bool) -> torch.Tensor:
        """Attend for as many rows of queries at once as there is memory for their scores."""
        x = x.contiguous()  # else Linear multiplies a row of pixels at a time, where no gradients are needed
        dtype = kernel_dtype(x)
        coupled = self.relative and getattr(self.encoding, 'full', False)
        # keys have no probabilities to drop on a CPU, nor in plain operators
        dropped = drops and (dtype is None or x.device.type == 'cpu')
        by_keys = not (self.key is None or coupled or dropped)
        by_pixels = (
            by_keys and self.pixel_keys and key is None and dtype is not None
            and x.shape[:3].numel() > self.dim  # else the product of the maps is more work than keys
            and type(self.query) is nn.Linear and not hooked(self.query)
            and type(self.key) is nn.Linear and not hooked(self.key))
        attend: Any = self._by_pixels if by_pixels else self._by_keys if by_keys else self._by_map
        if dtype is None or torch.compiler.is_compiling():
            return attend(x, key)
        _, height, width, _ = x.shape
        maps = self.num_heads * (1 if self.terms == ('position',) else len(x))
        row = maps * width * height * width * torch.promote_types(x.dtype, torch.float32).itemsize
        fit = (CPU_MAP_BYTES if x.device.type == 'cpu' else DEVICE_MAP_BYTES) // max(1, row)
        if fit >= height:
            return attend(x, key)
        # windows rest on numbers, which fake tensors and counters of operators lack, and devices read back too slowly
        numbers = x.device.type == 'cpu' and torch._C._len_torch_dispatch_stack() == 0
        if self.terms == ('position',) and not self.separable and numbers:
            attend = self._by_windows
        if self.key is not None and key is None and not by_pixels:
            key = self.keys(x)
        out: List[torch.Tensor] = []
        for queries in torch.arange(height, device=x.device).split(max(1, fit)):
            out.append(attend(x, key, queries))
        return torch.cat(out, dim=1)

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend, to keys given or x's own (see :meth:`keys`); x and the result have shape (B, H, W, dim).

        Raises:
            ValueError: If x has another shape.
            TypeError: If x has another dtype than the layer's weights.
        """
        weight: Optional[torch.Tensor] = None
        explicit, drops = not self.fused_attn, self.training and self.attn_drop.p > 0.
        if not torch.jit.is_scripting():
            if type(self.value) is nn.Linear:
                weight = self.value.weight
            # a hook on this dropout needs the map, one on all modules, as profilers set, does not
            watched = hooked(self.attn_drop) and not hooked(self.proj_drop)
            explicit = explicit or watched or (len(switches) > 0 and computed_by.get() == 'maps')
        x = check_input(x, self.dim, weight)
        if self.separable and not (explicit or drops):
            x = self._by_factors(x)
        elif torch.jit.is_scripting() or explicit:
            x = self._by_map(x, key)
        else:
            x = self._by_rows(x, key, drops)
        return self.proj_drop(self.proj(x))
