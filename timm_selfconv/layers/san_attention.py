"""Vector self-attention over a footprint of pixels, pairwise and patchwise.

'Exploring Self-attention for Image Recognition', Zhao, Jia, Koltun, CVPR 2020
- https://arxiv.org/abs/2004.13621
"""
from typing import Any, Final, Iterator, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function

__all__ = [
    'PassBatchNorm2d', 'PointwiseConv2d', 'SanAttention2d', 'aggregate', 'footprint', 'pairwise_relation',
    'patchwise_relation', 'pixel_coordinates', 'pointwise',
]

KINDS = ('pairwise', 'patchwise')


def windows(x: torch.Tensor, kernel_size: int, stride: int, dilation: int) -> List[torch.Tensor]:
    """Views of x, shape (..., H, W), of equal shape: one an offset of a kernel that stays inside, row by row."""
    reach = dilation * (kernel_size - 1)
    rows, cols = x.shape[-2] - reach, x.shape[-1] - reach
    views: List[torch.Tensor] = []
    for i in range(kernel_size):
        for j in range(kernel_size):
            top, left = i * dilation, j * dilation
            views.append(x[..., top:top + rows:stride, left:left + cols:stride])
    return views


def reflected_margin(x: torch.Tensor, kernel_size: int, dilation: int) -> int:
    """How many pixels a footprint reaches beyond x, shape (..., H, W), or a ValueError if that can't be reflected."""
    margin = dilation * (kernel_size // 2)
    if min(x.shape[-2], x.shape[-1]) <= margin:
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width of at least {margin + 1}')
    return margin


def footprint(x: torch.Tensor, kernel_size: int, stride: int = 1, dilation: int = 1) -> List[torch.Tensor]:
    """What each query's footprint holds, border pixels reflected.

    Queries sit at every stride-th row and column, the first ones included, each in the middle of its own footprint.

    Args:
        x: Pixels, shape (B, C, H, W).
        kernel_size: Side of the footprint, odd.
        stride: Pixels from one query to the next.
        dilation: Pixels from one pixel of a footprint to the next.

    Returns:
        One tensor an offset, row by row, shape (B, C, ceil(H / stride), ceil(W / stride)) each.

    Raises:
        ValueError: If the footprint reaches farther than the image can be reflected.
    """
    margin = reflected_margin(x, kernel_size, dilation)
    if margin > 0:
        x = F.pad(x, (margin, margin, margin, margin), mode='reflect')
    return windows(x, kernel_size, stride, dilation)


@torch.fx.wrap
@register_notrace_function
def pairwise_relation(
        query: torch.Tensor,
        key: torch.Tensor,
        place: torch.Tensor,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
) -> torch.Tensor:
    """Differences of each query and the keys of its footprint, and of their places.

    Args:
        query: Queries, shape (B, C, H, W), of which the stride leaves shape (B, C, H', W').
        key: Keys, shape (B, C, H, W).
        place: Features of the pixels' places, shape (1, P, H, W).
        kernel_size: Side of the footprint, odd.
        stride: Pixels from one query to the next.
        dilation: Pixels from one pixel of a footprint to the next.

    Returns:
        Differences, shape (B, C + P, kernel_size ^ 2 H', W'): the footprint's pixels one below the other.
    """
    query, centre = query[:, :, ::stride, ::stride], place[:, :, ::stride, ::stride]
    keys = footprint(key, kernel_size, stride, dilation)
    places = footprint(place, kernel_size, stride, dilation)
    pairs: List[torch.Tensor] = []
    for i in range(len(keys)):
        pairs.append(torch.cat([query - keys[i], (centre - places[i]).expand(key.shape[0], -1, -1, -1)], dim=1))
    return torch.cat(pairs, dim=2)


@torch.fx.wrap
@register_notrace_function
def patchwise_relation(
        query: torch.Tensor,
        key: torch.Tensor,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
) -> torch.Tensor:
    """Each query and the keys of its whole footprint, side by side.

    Args:
        query: Queries, shape (B, C, H, W), of which the stride leaves shape (B, C, H', W').
        key: Keys, shape (B, C, H, W).
        kernel_size: Side of the footprint, odd.
        stride: Pixels from one query to the next.
        dilation: Pixels from one pixel of a footprint to the next.

    Returns:
        Query, then keys, offsets row by row, shape (B, C (1 + kernel_size ^ 2), H', W').
    """
    patch = [query[:, :, ::stride, ::stride]]
    patch.extend(footprint(key, kernel_size, stride, dilation))
    return torch.cat(patch, dim=1)


def weighted_sum(
        value: torch.Tensor,
        weights: torch.Tensor,
        kernel_size: int,
        stride: int,
        dilation: int,
) -> torch.Tensor:
    """:func:`aggregate`, operator by operator."""
    margin = reflected_margin(value, kernel_size, dilation)
    # long rows of one channel: a footprint's shift then moves whole rows, whatever the memory format around
    value, weights = value.contiguous(), weights.contiguous()
    if margin > 0:
        value = F.pad(value, (margin, margin, margin, margin), mode='reflect')
    out = torch.zeros(0)
    for i, shifted in enumerate(windows(value.unflatten(1, [-1, weights.shape[2]]), kernel_size, stride, dilation)):
        out = weights[:, i, None] * shifted if i == 0 else torch.addcmul(out, weights[:, i, None], shifted)
    return out.flatten(1, 2)


def memory_order(x: torch.Tensor) -> List[int]:
    """Dimensions but the first one, shape (B, ...), from the outermost in memory to the innermost."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def images_last(x: torch.Tensor) -> torch.Tensor:
    """x, shape (B, ...), with all images' same pixel side by side in memory: even a small grid has long runs then."""
    order = memory_order(x)
    rows = x.permute(0, *order).flatten(1).t().contiguous()
    return rows.unflatten(0, [x.shape[i] for i in order]).permute(-1, *(order.index(i) for i in range(1, x.dim())))


def write_images_first(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy x to out, shape (B, ...) both, image by image in the memory of out."""
    order = memory_order(out)  # a transposed matrix: torch copies those in blocks
    out.permute(0, *order).flatten(1).copy_(x.permute(*order, 0).flatten(0, -2).t())


def reflect_border(x: torch.Tensor, margin: int) -> torch.Tensor:
    """x, shape (B, C, H, W), with its border pixels reflected; images innermost in memory."""
    batch, channels, height, width = x.shape
    out = x.new_empty(height + 2 * margin, width + 2 * margin, channels, batch).permute(3, 2, 0, 1)
    out[:, :, margin:margin + height, margin:margin + width] = x
    for dim, size in ((2, height), (3, width)):
        for j in range(1, margin + 1):
            out.select(dim, margin - j).copy_(out.select(dim, margin + j))
            out.select(dim, margin + size - 1 + j).copy_(out.select(dim, margin + size - 1 - j))
    return out


def fold_border(x: torch.Tensor, margin: int) -> torch.Tensor:
    """Add to each pixel, in place, what its reflections got: the transpose of :func:`reflect_border`."""
    for dim in (3, 2):
        size = x.shape[dim] - 2 * margin
        for j in range(1, margin + 1):
            x.select(dim, margin + j).add_(x.select(dim, margin - j))
            x.select(dim, margin + size - 1 - j).add_(x.select(dim, margin + size - 1 + j))
        x = x.narrow(dim, margin, size)
    return x


class WeightedSum(torch.autograd.Function):
    """:func:`weighted_sum`, a group of images at a time, all of it in the cache."""
    GROUP_BYTES = 128  # of the images side by side: what vector units take in one step

    @classmethod
    def groups(cls, *tensors: torch.Tensor) -> Iterator[Tuple[torch.Tensor, ...]]:
        """A few images of all tensors, shape (B, ...) each."""
        size = cls.GROUP_BYTES // tensors[0].element_size()
        return zip(*(x.split(size) for x in tensors))

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weights: torch.Tensor, *sizes: int) -> torch.Tensor:
        ctx.save_for_backward(value, weights)
        ctx.sizes = sizes
        margin, (maps, height, width) = reflected_margin(value, sizes[0], sizes[2]), weights.shape[2:]
        out = value.new_empty(len(value), height, width, value.shape[1]).permute(0, 3, 1, 2)
        for v, w, y in WeightedSum.groups(value, weights, out):
            v = reflect_border(images_last(v), margin).unflatten(1, (-1, maps))
            w = images_last(w)
            total = v.new_empty(height, width, *v.shape[1:3], len(v)).permute(4, 2, 3, 0, 1)
            for i, shifted in enumerate(windows(v, *sizes)):
                torch.mul(w[:, i, None], shifted, out=total) if i == 0 else total.addcmul_(w[:, i, None], shifted)
            write_images_first(total.flatten(1, 2), y)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        value, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return (*torch.func.vjp(lambda v, w: weighted_sum(v, w, *ctx.sizes), value, weights)[1](grad), *[None] * 3)
        margin, maps = reflected_margin(value, ctx.sizes[0], ctx.sizes[2]), weights.shape[2]
        grad_value, grad_weights = torch.empty_like(value), torch.empty_like(weights)
        for v, w, g, gv, gw in WeightedSum.groups(value, weights, grad, grad_value, grad_weights):
            v = reflect_border(images_last(v), margin)
            w, g = images_last(w), images_last(g).unflatten(1, (-1, maps))
            to_v, to_w, product = torch.zeros_like(v), torch.empty_like(w), torch.empty_like(g)
            shifts = zip(*(windows(x.unflatten(1, (-1, maps)), *ctx.sizes) for x in (v, to_v)))
            for i, (shifted, to_shifted) in enumerate(shifts):
                to_shifted.addcmul_(w[:, i, None], g)
                torch.sum(torch.mul(g, shifted, out=product), 1, out=to_w[:, i])
            write_images_first(fold_border(to_v, margin), gv)
            write_images_first(to_w, gw)
        return grad_value, grad_weights, None, None, None


@torch.fx.wrap
@register_notrace_function
def aggregate(
        value: torch.Tensor,
        weights: torch.Tensor,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
) -> torch.Tensor:
    """Sum the values of each query's footprint with weights of its own for every channel.

    Args:
        value: Values, shape (B, C, H, W).
        weights: Weights, shape (B, kernel_size ^ 2, maps, ceil(H / stride), ceil(W / stride)), offsets row by row.
            Channel j uses map ``j mod maps``.
        kernel_size: Side of the footprint, odd.
        stride: Pixels from one query to the next.
        dilation: Pixels from one pixel of a footprint to the next.

    Returns:
        Sums, shape (B, C, ceil(H / stride), ceil(W / stride)).
    """
    weights = weights.to(value.dtype)
    if not torch.jit.is_scripting():
        if not torch.jit.is_tracing() and not torch.compiler.is_compiling():
            if value.shape[0] >= 16 or torch.is_grad_enabled():  # fewer images make no long runs
                return WeightedSum.apply(value, weights, kernel_size, stride, dilation)
    return weighted_sum(value, weights, kernel_size, stride, dilation)


@torch.fx.wrap
@register_notrace_function
def pixel_coordinates(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Rows and columns of all pixels, both from -1 to 1, shape (1, 2, height, width)."""
    rows = torch.linspace(-1., 1., height, device=like.device, dtype=like.dtype)
    cols = torch.linspace(-1., 1., width, device=like.device, dtype=like.dtype)
    return torch.stack([rows[:, None].expand(height, width), cols[None].expand(height, width)])[None]


@torch.fx.wrap
@register_notrace_function
def pointwise(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """1x1 convolution of x, shape (B, C, H, W), by the operator that a CPU is fastest at.

    In float32 that is the convolution, in bfloat16 the matrix product, whose backward pass takes a quarter of the time.
    """
    if not torch.jit.is_scripting():
        half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled('cpu')
        if half and x.device.type == 'cpu' and not torch.jit.is_tracing() and not torch.compiler.is_compiling():
            return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    return F.conv2d(x, weight, bias)


class PointwiseConv2d(nn.Conv2d):
    """1x1 convolution, see `pointwise`."""

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True, device=None, dtype=None):
        super().__init__(in_channels, out_channels, 1, bias=bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pointwise(x, self.weight, self.bias)


class PassBatchNorm2d(nn.Module):
    """Batch normalisation of a shared block: one scale and shift, running statistics of its own for each pass.

    Passes see different distributions, which no single set of statistics fits.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_features: int, passes: int = 1, device=None, dtype=None):
        """
        Args:
            num_features: Channels.
            passes: How often the block is passed.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.momentum = 0.1
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.empty(num_features, **dd))
        self.bias = nn.Parameter(torch.empty(num_features, **dd))
        self.register_buffer('running_mean', torch.empty(passes, num_features, **dd))
        self.register_buffer('running_var', torch.empty(passes, num_features, **dd))
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Scale 1, shift 0, and no statistics seen yet."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def forward(self, x: torch.Tensor, i: int = 0) -> torch.Tensor:
        """Normalise x, shape (B, C, H, W), with the statistics of pass i."""
        return F.batch_norm(
            x, self.running_mean[i], self.running_var[i], self.weight, self.bias, self.training, self.momentum,
            self.eps)


class SanAttention2d(nn.Module):
    """Attention whose weights are vectors: one for every channel (of a share of 8), from a small network.

    With j in the footprint R(i) of pixel i, and gamma the network BN, ReLU, linear, BN, ReLU, linear,

        pairwise:   y_i = sum_j softmax_j(gamma([q_i - k_j, p_i - p_j])) * v_j
        patchwise:  y_i = sum_j gamma([q_i, k_R(i)])_j * v_j

    where p are learned features of the pixels' coordinates and patchwise weights look at the whole footprint at once.
    """
    patchwise: Final[bool]

    def __init__(
            self,
            dim: int,
            kind: str = 'pairwise',
            kernel_size: int = 3,
            stride: int = 1,
            dilation: int = 1,
            qkv_bias: bool = True,
            passes: int = 1,
            device=None,
            dtype=None,
    ):
        """
        Args:
            dim: Channels of the input, a multiple of 32; queries and keys have a 16th of them, values and the output a
                quarter.
            kind: 'pairwise' or 'patchwise'.
            kernel_size: Side of the footprint, odd.
            stride: Pixels from one query to the next.
            dilation: Pixels from one pixel of a footprint to the next.
            qkv_bias: Give queries, keys and values a bias.
            passes: How often the layer is passed; see :class:`PassBatchNorm2d`.

        Raises:
            ValueError: If an argument is out of range.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f'kind={kind!r}: needs one of {KINDS}')
        if not isinstance(dim, int) or dim < 32 or dim % 32:
            raise ValueError(f'dim={dim!r}: needs a multiple of 32')
        for name, value in (('kernel_size', kernel_size), ('stride', stride), ('dilation', dilation)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f'{name}={value!r}: needs an integer of at least 1')
        if kernel_size % 2 == 0:
            raise ValueError(f'kernel_size={kernel_size}: needs an odd number')
        self.patchwise = kind == 'patchwise'
        self.kernel_size = kernel_size
        self.stride = stride
        self.dilation = dilation
        self.query_dim = dim // 16
        self.value_dim = dim // 4
        self.num_maps = self.value_dim // 8
        offsets = kernel_size ** 2

        # keys last: a pass that is given its keys leaves their rows out
        self.qvk = PointwiseConv2d(dim, 2 * self.query_dim + self.value_dim, bias=qkv_bias, **dd)
        if self.patchwise:
            widths = self.query_dim * (1 + offsets), self.num_maps, self.num_maps * offsets
        else:
            self.position = nn.Conv2d(2, 2, 1, **dd)
            widths = self.query_dim + 2, self.query_dim, self.num_maps
        self.norm1 = PassBatchNorm2d(widths[0], passes, **dd)
        self.weight1 = PointwiseConv2d(widths[0], widths[1], bias=False, **dd)
        self.norm2 = PassBatchNorm2d(widths[1], passes, **dd)
        self.weight2 = PointwiseConv2d(widths[1], widths[2], **dd)

    def weights(self, query: torch.Tensor, key: torch.Tensor, i: int = 0) -> torch.Tensor:
        """Attention weights from queries and keys, shape (B, query_dim, H, W), in pass i.

        Returns:
            Weights, shape (B, kernel_size ^ 2, dim / 32, H', W'); pairwise ones sum to 1 over the footprint.
        """
        sizes = self.kernel_size, self.stride, self.dilation
        if self.patchwise:
            x = patchwise_relation(query, key, *sizes)
        else:
            place = self.position(pixel_coordinates(key.shape[2], key.shape[3], key))
            x = pairwise_relation(query, key, place.to(key.dtype), *sizes)
        x = self.weight1(F.relu(self.norm1(x, i), inplace=True))
        x = self.weight2(F.relu(self.norm2(x, i), inplace=True))
        offsets = self.kernel_size * self.kernel_size
        if self.patchwise:
            return x.unflatten(1, [offsets, self.num_maps])
        return x.unflatten(2, [offsets, -1]).softmax(dim=2).transpose(1, 2)

    def forward(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            i: int = 0,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Attend in pass i, to keys given or x's own.

        Args:
            x: Input, shape (B, dim, H, W).
            key: Keys of an earlier pass, shape (B, dim / 16, H, W).
            i: Number of the pass.

        Returns:
            Output, shape (B, dim / 4, ceil(H / stride), ceil(W / stride)), and the keys.
        """
        rows = self.query_dim + self.value_dim + (self.query_dim if key is None else 0)
        bias = self.qvk.bias
        x = pointwise(x, self.qvk.weight[:rows], None if bias is None else bias[:rows])
        query, value = x[:, :self.query_dim], x[:, self.query_dim:self.query_dim + self.value_dim]
        if key is None:
            key = x[:, self.query_dim + self.value_dim:]
        x = aggregate(value, self.weights(query, key, i), self.kernel_size, self.stride, self.dilation)
        return x.contiguous(memory_format=torch.channels_last), key  # like all that is made of matrix products
