"""Multi-head self-attention over a pixel grid: scores to probabilities to values, by the fastest path."""
from typing import Any, Optional, Sequence, Tuple, cast

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, use_fused_attn

from .adapters import plain_copy
from .encodings import select_parameter
from .kernels import key_attention, map_attention, separable_attention
from .kernels.kernel import autocast_dtype, computed_by, counted, flush_denormals, hooked, needs_plain_ops
from .kernels.low_rank import low_rank_attention
from .kernels.positions import gather_by_factors, gather_by_maps
from .kernels.windows import gaussian_windows
from .scores import AttentionScores, from_largest

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
    if not torch.jit.is_scripting():  # it knows no autocast of a device
        if weight is not None and (not x.is_floating_point() or autocast_dtype(x) != autocast_dtype(weight)):
            raise TypeError(f"x of dtype {x.dtype}: needs the layer's, {weight.dtype}")
    return x


@torch.fx.wrap
@register_notrace_function
def axis_probs(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities of keys along one axis, shape (heads, queries, keys).

    A function, for who looks for whole maps in a graph looks for `softmax`.
    """
    return scores.softmax(dim=-1)


def rows_at_once(x: torch.Tensor, maps: int) -> int:
    """Rows of queries whose scores fit in memory, 0 for all; x of shape (B, H, W, C), so many maps of it."""
    if needs_plain_ops(x):
        return 0
    row = maps * x.shape[2] * x.shape[1] * x.shape[2] * torch.promote_types(x.dtype, torch.float32).itemsize
    fit = (CPU_MAP_BYTES if x.device.type == 'cpu' else DEVICE_MAP_BYTES) // max(1, row)
    return 0 if fit >= x.shape[1] else max(1, fit)


class HeadValues(nn.Module):
    """Values of heads with fewer channels than the layer, ``sum_h (W_val^h W_out^h)`` of equation (4).

    Attributes:
        head_weight: ``W_val`` of each head, shape (heads, dim, head_dim).
        out: ``W_out`` of all heads, a Linear from heads head_dim channels to dim.
    """

    def __init__(self, num_heads: int, dim: int, head_dim: int, device=None, dtype=None):
        super().__init__()
        self.head_weight = nn.Parameter(torch.empty(num_heads, dim, head_dim, device=device, dtype=dtype))
        self.out = nn.Linear(num_heads * head_dim, dim, device=device, dtype=dtype)
        nn.init.uniform_(self.head_weight, -dim ** -0.5, dim ** -0.5)

    @property
    def weight(self) -> torch.Tensor:
        """Product of both maps, of rank head_dim in each head: shape (dim, heads dim)."""
        out = self.out.weight.unflatten(1, (-1, self.head_weight.shape[2]))
        return torch.einsum('hcd,ohd->ohc', self.head_weight, out).flatten(1)

    @property
    def bias(self) -> torch.Tensor:
        return self.out.bias

    def forward(self, gathered: torch.Tensor) -> torch.Tensor:
        """Values of what all heads gather, shape (..., heads dim): shape (..., dim)."""
        gathered = gathered.unflatten(-1, [self.head_weight.shape[0], self.head_weight.shape[1]])
        return self.out(torch.einsum('bijhc,hcd->bijhd', gathered, self.head_weight.to(gathered.dtype)).flatten(-2))


class SelfAttention2d(AttentionScores):
    """Multi-head self-attention on a grid of pixels with relative or absolute position encoding.

    With ``delta = k - q`` the offset of a key from a query, head h scores (equation 8)

        A[q, k] = (x_q Wq Wk' x_k  +  x_q Wq r_delta  +  u Wk' x_k) / sqrt(D)  +  v r_delta
                   content            content_position   key_bias                 position

    and the layer returns ``sum_h softmax(A_h) X W_h`` (equations 1 and 4) through one more linear map. Every head has
    as many channels as the layer: the paper's theorem gives min(D_h, D_out) output channels.

    Position-only attention with a separable encoding runs through its row and column factors; attention with content
    without a tensor of all scores. Both give way to an explicit map, softmax then ``attn_drop``, where that
    is asked for: ``fused_attn`` off, a hook on ``attn_drop``, or dropout of probabilities that have only factors.
    """

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
            device=None,
            dtype=None,
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
        if head_dim is not None and (isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1):
            raise ValueError(f'head_dim={head_dim!r}: needs an integer of at least 1, or None')
        super().__init__(dim, num_heads, terms, encoding, grid_size, qk_bias, device, dtype)
        self.fused_attn = use_fused_attn()
        self.tolerance: Optional[float] = None  # see `fuse`
        self.attn_drop = nn.Dropout(attn_drop)
        self.value: Any = nn.Linear(num_heads * dim, dim, device=device, dtype=dtype) if head_dim is None else \
            HeadValues(num_heads, dim, head_dim, device, dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype) if proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

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
        fused = plain_copy(self, ('value', 'proj')).eval().requires_grad_(False)
        if type(fused.proj) is not nn.Identity:
            value, proj = fused.value, cast(nn.Linear, fused.proj)
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
        select_parameter(self.value, 'weight', channels, dim=1)
        self.value.in_features = len(channels)
        if self.key_bias is not None:
            select_parameter(self, 'key_bias', index)
        self.num_heads = len(heads)

    def _choose_path(self, x: torch.Tensor) -> Tuple[str, int]:
        """Choose how x goes through: by 'factors', 'keys', 'windows' or a 'map', and rows of queries at once (0: all).

        Whole maps are for who asks: by timm's switch, :func:`explicit_maps` or a hook on ``attn_drop``. Factors have no
        probabilities to drop, nor have keys on a CPU.
        """
        drops = self.training and self.attn_drop.p > 0.
        if torch.jit.is_scripting():
            return ('factors' if self.separable and self.fused_attn and not drops else 'map'), 0
        else:  # torchscript compiles what follows a return, but not an else
            # a hook on this dropout wants to see the map, but not a hook on all modules, as profilers set
            watched = hooked(self.attn_drop) and not hooked(self.proj_drop)
            if watched or not self.fused_attn or computed_by.get() == 'maps':
                return 'map', 0
            if self.separable and not drops:
                return 'factors', 0
            gaussian = self.terms == ('position',)
            rows = rows_at_once(x, self.num_heads * (1 if gaussian else x.shape[0]))
            if self.key is None:
                # windows rest on numbers: read back from a device they would cost more than they save
                known = rows > 0 and x.device.type == 'cpu' and not counted()
                return ('windows' if known and gaussian and not self.separable else 'map'), rows
            coupled = self.relative and getattr(self.encoding, 'full', False)
            dropped = drops and (needs_plain_ops(x, False) or x.device.type == 'cpu')
            return ('map' if coupled or dropped else 'keys'), rows

    def _through_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Attend by the probabilities of rows and of columns."""
        rows, cols, _ = self.encoding(None, x.shape[1], x.shape[2])
        row_probs, col_probs = axis_probs(rows[0, :, :, 0]), axis_probs(cols[0, :, 0])
        if not torch.jit.is_scripting():
            # who hooks the values sees them called
            if type(self.value) is nn.Linear and not hooked(self.value):
                inputs = row_probs, col_probs, x, self.value.weight, self.value.bias
                if self.tolerance is None or needs_plain_ops(x) or (torch.is_grad_enabled() and x.requires_grad):
                    return separable_attention(*inputs)
                return low_rank_attention(*inputs, self.tolerance)
        return self.value(gather_by_factors(row_probs, col_probs, x).flatten(3))

    @torch.jit.unused
    def _through_keys(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """Attend for these rows of queries without a tensor of scores."""
        query, key, rows, cols, _ = self.score_parts(x, key, first, last)
        assert query is not None and key is not None
        if rows is not None and cols is not None:
            rows, cols = from_largest(rows), from_largest(cols)
        drop = self.attn_drop.p if self.training else 0.
        gathered = key_attention(query, key, x.flatten(1, 2)[:, None], rows, cols, drop)
        return self.value(gathered.flatten(3))

    @torch.jit.unused
    def _through_windows(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Attend for these rows of queries, each Gaussian head within its window."""
        gathered = torch.stack([
            flush_denormals(self.attn_drop(probs), x.dtype) @ x[:, i:j].flatten(1, 2)
            for probs, i, j in gaussian_windows(
                self.encoding.centers, self.encoding.precisions(), x.shape[1], x.shape[2], first, last)], dim=2)
        return self.value(gathered.unflatten(1, (-1, x.shape[2])).flatten(3))

    def _through_map(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """Attend for these rows of queries by an explicit map."""
        attn = self.scores(x, key, first, last)
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

    def _attend(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
            path: str,
            first: int,
            last: Optional[int],
    ) -> torch.Tensor:
        """Attend for the rows of queries from first to last, all by default: shape (B, Q, W, dim)."""
        if path == 'keys':
            return self._through_keys(x, key, first, last)
        if path == 'windows' and last is not None:
            return self._through_windows(x, first, last)
        return self._through_map(x, key, first, last)

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend, to keys given or x's own (see :meth:`keys`); x and the result have shape (B, H, W, dim).

        Raises:
            ValueError: If x has another shape.
            TypeError: If x has another dtype than the layer's weights.
        """
        weight: Optional[torch.Tensor] = None
        if not torch.jit.is_scripting():
            if type(self.value) is nn.Linear:
                weight = self.value.weight
        x = check_input(x, self.dim, weight)
        path, rows = self._choose_path(x)
        if self.separable and path == 'factors':
            x = self._through_factors(x)
        elif rows == 0:
            x = self._attend(x, key, path, 0, None)
        else:
            if self.key is not None and key is None:
                key = self.keys(x)
            parts = [self._attend(x, key, path, first, first + rows) for first in range(0, x.shape[1], rows)]
            x = torch.cat(parts, dim=1)
        return self.proj_drop(self.proj(x))
