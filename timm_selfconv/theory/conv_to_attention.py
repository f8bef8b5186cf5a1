"""From convolution to attention: Theorem 1 of the paper, as a module that computes what the convolution did.

Lemma 1: a convolution is attention if each head attends to one pixel at a fixed offset from the query, that of a kernel
tap, and has the tap's weights for values. Lemma 2: scores in the quadratic encoding attend like that in the limit of
sharp Gaussians. The paper's remarks carry over one to one: the input is padded as the convolution pads it, and what is
padded is a key like any other; a stride keeps every so many queries; a dilation moves the heads apart.
"""
from math import prod
from typing import List, Optional, Sequence, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm_selfconv.layers.axis_scores import at_least_float32, gaussian_axis_scores

__all__ = ['ConvAttention', 'conv_to_attention']

Conv = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# heads attend together as long as what they gather has at most OUTPUTS times the output's elements, or ELEMENTS
OUTPUTS, ELEMENTS = 4, 2 ** 20


def query_positions(size: int, kernel_size: int, dilation: int, stride: int) -> range:
    """Positions of a kernel's middle on one axis, padding included, for each output of a convolution without padding.

    An even kernel has its middle before the centre, as padding='same' has it, so that there output i is query i.
    """
    reach = dilation * (kernel_size - 1)
    return range(reach // 2, size - (reach - reach // 2), stride)


def tap_centers(kernel_size: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """Offset of each kernel tap from the kernel's middle, in pixels, last axis fastest, shape (taps, K)."""
    axes = [torch.arange(k) * d - d * (k - 1) // 2 for k, d in zip(kernel_size, dilation)]
    return torch.cartesian_prod(*axes).view(-1, len(axes))


def pad_widths(conv: Union[Conv, 'ConvAttention']) -> List[int]:
    """A convolution's padding as `torch.nn.functional.pad` takes it: last axis first, before and after."""
    if isinstance(conv.padding, str):
        widths = [d * (k - 1) if conv.padding == 'same' else 0 for k, d in zip(conv.kernel_size, conv.dilation)]
        return [half for width in reversed(widths) for half in (width // 2, width - width // 2)]
    return [width for width in reversed(conv.padding) for _ in range(2)]


def gather(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attend along every axis in turn.

    An axis is met when it stands first, and what comes of it is put last: every product is one of matrices as they lie
    in memory, no copy is made, and the attention's axes end up behind the others. From x, shape
    (heads or 1, n_1, ..., n_K, ...), and factors, shapes (heads, q_i, n_i), comes shape (heads, ..., q_1, ..., q_K).
    """
    for factor in factors:
        rest = x.shape[2:]
        x = (x.flatten(2).transpose(1, 2) @ factor.to(x.dtype).transpose(1, 2)).unflatten(1, rest)
    return x


class ConvAttention(nn.Module):
    """A convolution along K axes as multi-head self-attention, one head per kernel tap (Theorem 1 of the paper).

    Keys k are all pixels of the padded input, queries q those that the kernel's middle is placed on. Head h attends by
    position only (equation 8 with its last term), with the quadratic encoding (lemma 2) of dimension K + 1:

        y[q] = bias + sum_h sum_k softmax_k(v_h r_(k - q)) W_h x[k]
        v_h = -alpha_h (1, -2 Delta_h),   r_delta = (|delta|^2, delta)

    As ``v r_delta = -alpha |delta - Delta|^2`` up to a constant, the softmax is a product of one softmax per axis,
    exactly and borders included. The layer never holds a map over all pairs of pixels: with K = 2 and N pixels it costs
    O(N^1.5), not O(N^2).

    All parameters train. Gradients of centres and spreads are as small as the attention that other pixels than the
    tap's get: with alpha = 46 next to nothing, so lower the spreads to let heads move. A pixel that is infinite or not
    a number spoils all outputs, not just those whose kernel meets it.

    Attributes:
        centers: ``Delta``, where each head looks, in pixels from the query, shape (heads, K). Heads stand in the order
            of the kernel's taps, last axis fastest.
        spreads: Inverse standard deviation of each head's Gaussian, in 1 / pixels; ``alpha = spread^2 / 2``, shape
            (heads,).
        value_weight: ``W_h``, shape (heads, out_channels, in_channels // groups).
        bias: Shape (out_channels,), or None.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: As the convolution has
            them (padding a tuple, 'same' or 'valid'). Kernel size and dilation say here how far inside the padded grid
            the queries stand.
    """
    bias: Optional[torch.Tensor]

    def __init__(self, conv: Conv, alpha: float = 46.):
        """
        Args:
            conv: The convolution, as :func:`conv_to_attention` checks it.
            alpha: Inverse width of every head's Gaussian.
        """
        super().__init__()
        self.in_channels = conv.in_channels
        self.out_channels = conv.out_channels
        self.kernel_size = conv.kernel_size
        self.stride = conv.stride
        self.padding = conv.padding
        self.dilation = conv.dilation
        self.groups = conv.groups
        self.padding_mode = conv.padding_mode

        weight, trains = conv.weight.detach(), conv.weight.requires_grad
        value_weight = weight.flatten(2).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        centers = tap_centers(conv.kernel_size, conv.dilation).to(weight)
        self.centers = nn.Parameter(centers, trains)
        self.spreads = nn.Parameter(centers.new_full((len(centers),), (2 * alpha) ** 0.5), trains)
        self.value_weight = nn.Parameter(value_weight, trains)
        self.register_parameter(
            'bias', None if conv.bias is None else nn.Parameter(conv.bias.detach().clone(), conv.bias.requires_grad))
        self.train(conv.training)

    @property
    def num_heads(self) -> int:
        return len(self.centers)

    def extra_repr(self) -> str:
        text = f'{self.in_channels}, {self.out_channels}, heads={self.num_heads}, kernel_size={self.kernel_size}'
        for name, default in (('stride', (1,)), ('padding', (0,)), ('dilation', (1,))):
            value = getattr(self, name)
            text += '' if value == default * len(self.kernel_size) else f', {name}={value!r}'
        text += '' if self.groups == 1 else f', groups={self.groups}'
        text += '' if self.bias is not None else ', bias=False'
        return text + ('' if self.padding_mode == 'zeros' else f', padding_mode={self.padding_mode!r}')

    def queries(self, size: Sequence[int]) -> List[range]:
        """Positions of the queries along each axis of a padded input.

        Raises:
            ValueError: If the input is smaller than the kernel.
        """
        queries = [query_positions(*axis) for axis in zip(size, self.kernel_size, self.dilation, self.stride)]
        if not all(queries):
            raise ValueError(
                f'x of size {list(size)} with its padding: needs room for a kernel of {list(self.kernel_size)} with '
                f'dilation {list(self.dilation)}')
        return queries

    def axis_factors(self, size: Sequence[int], heads: slice = slice(None)) -> List[torch.Tensor]:
        """Attention along each axis; their product is the attention.

        Args:
            size: Size of the padded input along each axis.
            heads: Which heads.

        Returns:
            Probabilities, at least float32, shapes (heads, queries, keys).
        """
        precision = at_least_float32(self.spreads[heads]).square()
        factors = []
        for axis, queries in enumerate(self.queries(size)):
            positions = torch.arange(
                queries.start, queries.stop, queries.step, device=precision.device, dtype=precision.dtype)
            scores = gaussian_axis_scores(self.centers[heads, axis], precision, size[axis], positions)
            factors.append(scores.softmax(dim=-1))
        return factors

    def attention_probs(self, size: Sequence[int]) -> torch.Tensor:
        """Attention of all queries to all keys, which is what the layer never makes itself.

        Args:
            size: Size of the input along each axis, without padding.

        Returns:
            Probabilities, at least float32, shape (heads, q_1, ..., q_K, k_1, ..., k_K): one query per output pixel,
            one key per pixel of the padded input.
        """
        widths, dims = pad_widths(self)[::-1], len(self.kernel_size)
        factors = self.axis_factors([n + sum(widths[2 * i:2 * i + 2]) for i, n in enumerate(size)])
        operands = [a for i, factor in enumerate(factors) for a in (factor, [0, 1 + i, 1 + dims + i])]
        return torch.einsum(*operands, list(range(1 + 2 * dims)))

    def attend(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Contribution of some heads to the output.

        Pixels become values before or after they are attended to, whichever leaves fewer channels to attend to.

        Args:
            x: Padded input, shape (n_1, ..., n_K, in_channels, B).
            heads: Which heads.

        Returns:
            Their part of the output, shape (out_channels, B, q_1, ..., q_K).
        """
        size, batch, groups = x.shape[:-2], x.shape[-1], self.groups
        factors = self.axis_factors(size, heads)
        weight = self.value_weight[heads].unflatten(1, (groups, -1))
        if self.out_channels < self.in_channels:
            pixels = x.reshape(prod(size), groups, weight.shape[3], batch)
            values = torch.einsum('ngcb,hgdc->hngdb', pixels, weight)
            return gather(values.reshape(len(weight), *size, self.out_channels, batch), factors).sum(dim=0)
        gathered = gather(x[None], factors)
        shape = self.out_channels, *gathered.shape[2:]
        return torch.einsum('hgcm,hgdc->gdm', gathered.flatten(2).unflatten(1, (groups, -1)), weight).reshape(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve x, shape (B, in_channels, n_1, ..., n_K) or without B.

        Raises:
            ValueError: If x has another shape, or is smaller than the kernel.
        """
        dims = len(self.kernel_size)
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-1 - dims] != self.in_channels:
            raise ValueError(
                f'x of shape {list(x.shape)}: needs {self.in_channels} channels and {dims} axes after them, and one '
                'before them or none')
        if x.dim() == dims + 1:
            return self.forward(x[None])[0]

        x = F.pad(x, pad_widths(self), 'constant' if self.padding_mode == 'zeros' else self.padding_mode)
        batch, size = x.shape[0], x.shape[2:]
        outputs = batch * self.out_channels * prod([len(axis) for axis in self.queries(size)])
        gathered = batch * min(self.in_channels, self.out_channels) * prod(size)
        step = max(1, max(OUTPUTS * outputs, ELEMENTS) // max(1, gathered))

        x = x.permute(*range(2, dims + 2), 1, 0).contiguous()
        out = x.new_zeros(())
        for start in range(0, self.num_heads, step):
            part = self.attend(x, slice(start, start + step))
            out = out + at_least_float32(part)  # a sum of halves would be rounded once per step
        out = out.to(part.dtype).transpose(0, 1)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).view(-1, *[1] * dims)
        return out.contiguous()


def check_conv(conv: nn.Module) -> Conv:
    """Check that a module is a convolution, and nothing but one with the weight that it holds, and return it.

    Raises:
        ValueError: If it is not.
    """
    name = type(conv).__name__
    if not isinstance(conv, CONVS):
        raise ValueError(f'conv={name}: needs an nn.Conv1d, nn.Conv2d or nn.Conv3d')
    if nn.parameter.is_lazy(conv.weight):
        raise ValueError(f'conv={name}: is lazy and needs to have seen an input first')
    kind = next(kind for kind in CONVS if isinstance(conv, kind))
    if any(getattr(getattr(conv, f), '__func__', None) is not getattr(kind, f) for f in ('forward', '_conv_forward')):
        raise ValueError(f'conv={name}: has a forward of its own, needs that of nn.{kind.__name__}')
    hooks = conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks, conv._backward_pre_hooks
    names = {name for name, _ in conv.named_parameters()}
    if names not in ({'weight'}, {'weight', 'bias'}) or any(hooks):
        raise ValueError(f'conv={name}: is parametrized, pruned or hooked; remove that first, or make it permanent')
    if not conv.weight.is_floating_point():
        raise ValueError(f'conv={name}: has {conv.weight.dtype} weights, needs real floating point')
    centers = tap_centers(conv.kernel_size, conv.dilation)
    if not torch.equal(centers.to(conv.weight.dtype).to(centers.dtype), centers):
        raise ValueError(
            f'dilation={conv.dilation}: {conv.weight.dtype} does not hold the offsets of its taps; convert in float32')
    return conv


def conv_to_attention(conv: nn.Module, alpha: float = 46.) -> ConvAttention:
    """Turn a convolution into the self-attention that Theorem 1 of the paper says it is.

    Lemma 2 is a limit, alpha to infinity. A head gives each of the 2 K pixels next to its tap's ``exp(-alpha)`` of what
    that one gets, so an output is off by about ``2 K exp(-alpha)`` of the largest pixel. Rounding (eps / 2) hides this
    from ``alpha = ln(4 K / eps)`` on: for K = 3 7.4 in bfloat16, 9.5 in float16, 18.5 in float32 and 38.6 in float64.
    The default, 46, leaves 6e-20 and serves them all. The paper chooses 46 for float32 by its smallest positive number,
    1e-45, but ``exp(-46)`` is 1e-20: attention to the others is zero to the last bit from ``alpha = 104`` on, and from
    746 in float64. That matters only where pixels differ by a factor of 1e10 or more.

    Args:
        conv: An nn.Conv1d, Conv2d or Conv3d; it is left as it is.
        alpha: Inverse width of the heads' Gaussians, ``-alpha |delta - Delta|^2``, in 1 / pixels^2. What it may be at
            most is 1e9 in float16 and 8e37 in bfloat16 and float32, where scores still have a number.

    Returns:
        The attention, in the convolution's mode, dtype and device; what was frozen in it is frozen.

    Raises:
        ValueError: If it is another kind of module, or computes more than a convolution with its weight (lazy,
            parametrized, pruned, hooked, a subclass with a forward of its own), or an argument is out of range.
    """
    conv = check_conv(conv)
    dtype = conv.weight.dtype
    # the spread, sqrt(2 alpha), must be finite in the layer's type, and its square where scores are computed
    scores = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    largest = min(scores / 4, torch.finfo(dtype).max * (torch.finfo(dtype).max / 4))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= largest:
        raise ValueError(f'alpha={alpha!r}: needs a positive number, in {dtype} up to {largest:.3g}')
    return ConvAttention(conv, alpha)
