"""A convolution as self-attention, with one head per kernel tap."""
from math import prod
from typing import List, Optional, Sequence, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.conv import _ConvNd

from .encodings import gaussian_axis_scores
from .functional import at_least_float32, gather_by_factors, gather_by_maps, image_chunks, maps_of_factors, \
    product_dtype

__all__ = ['CONVS', 'Conv', 'ConvAttention', 'tap_centers']

Conv = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# heads that attend together; with more heads, a step gathers OUTPUTS times the elements of the output, or ELEMENTS
AT_ONCE, OUTPUTS, ELEMENTS = 9, 4, 2 ** 20
# output channels per key above which maps are faster than factors
FEW_KEYS = 2


def tap_centers(kernel_size: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """Return the offset of each kernel tap from the middle, in pixels, last axis fastest, shape (taps, K)."""
    axes = [torch.arange(k) * d - d * (k - 1) // 2 for k, d in zip(kernel_size, dilation)]
    return torch.cartesian_prod(*axes).view(-1, len(axes))


def gather(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attend along each axis: x, shape (heads or 1, n_1, ..., n_K, ...), and factors, shapes (heads, q_i, n_i).

    Each product moves the first axis to the end, so no copy is made. The result has shape (heads, ..., q_1, ..., q_K).
    """
    for factor in factors:
        rest = x.shape[2:]
        x = (x.flatten(2).transpose(1, 2) @ factor.to(x.dtype).transpose(1, 2)).unflatten(1, rest)
    return x


class ConvAttention(nn.Module):
    """A convolution along K axes as multi-head self-attention, one head per kernel tap (Theorem 1).

    Keys k are the pixels of the padded input. Queries q are the pixels under the middle of the kernel. Head h attends
    by position only (the last term of equation 8), with the quadratic encoding (lemma 2) of dimension K + 1:

        y[q] = bias + sum_h sum_k softmax_k(v_h r_(k - q)) W_h x[k]
        v_h = -alpha_h (1, -2 Delta_h),   r_delta = (|delta|^2, delta)

    As ``v r_delta = -alpha |delta - Delta|^2`` up to a constant, the softmax is a product of one softmax per axis,
    borders included. With K = 2 and N pixels the layer costs O(N^1.5), not O(N^2). It makes a map only for few pixels.

    With alpha = 46 the gradients of centres and spreads are almost zero, so lower the spreads to train them. An
    infinite pixel or a nan affects all outputs.

    Attributes:
        centers: ``Delta``, the centre of each head, in pixels from the query, shape (heads, K). Heads are in the order
            of the kernel taps, last axis fastest.
        spreads: Inverse standard deviation of each head's Gaussian, in 1 / pixels; ``alpha = spread^2 / 2``, shape
            (heads,).
        value_weight: ``W_h``, shape (heads, out_channels, in_channels // groups).
        bias: Shape (out_channels,), or None.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: As in the convolution.
    """
    bias: Optional[torch.Tensor]

    def __init__(self, conv: Conv, alpha: float = 46.):
        """
        Args:
            conv: A plain convolution.
            alpha: Sharpness of the heads' scores ``-alpha |delta - Delta|^2``, in 1 / pixels^2, above 0.
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
        self.output_padding = conv.output_padding  # always 0, for torch's extra_repr
        self.pad_widths: List[int] = conv._reversed_padding_repeated_twice  # as torch.nn.functional.pad takes them

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

    @property
    def weight(self) -> torch.Tensor:
        """The values as a convolution weight, shape (out_channels, in_channels // groups, *kernel_size)."""
        return self.value_weight.permute(1, 2, 0).unflatten(2, self.kernel_size)

    def extra_repr(self) -> str:
        description: str = _ConvNd.extra_repr(self)  # type: ignore[arg-type]  # reads only attributes, and has them all
        return f'{description}, heads={self.num_heads}'

    def precisions(self) -> torch.Tensor:
        """Return the precision of each head in 2D, at least float32, shape (heads, 2, 2)."""
        return torch.diag_embed(at_least_float32(self.spreads).square()[:, None].expand(-1, 2))

    def axis_factors(self, size: Sequence[int]) -> List[torch.Tensor]:
        """Return attention along each axis of a padded input, at least float32, shapes (heads, queries, keys).

        The product of these factors is the attention. The middle of an even kernel is before its centre, as for
        padding='same'.

        Raises:
            ValueError: If the padded input is smaller than the kernel.
        """
        precision = at_least_float32(self.spreads).square()
        factors = []
        for axis, n in enumerate(size):
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1)
            if n <= reach:
                raise ValueError(
                    f'x of size {list(size)} with its padding: needs room for a kernel of {list(self.kernel_size)} '
                    f'with dilation {list(self.dilation)}')
            first, stop = reach // 2, n - (reach - reach // 2)
            queries = torch.arange(first, stop, self.stride[axis], device=precision.device, dtype=precision.dtype)
            factors.append(gaussian_axis_scores(self.centers[:, axis], precision, n, queries).softmax(dim=-1))
        return factors

    def attention_probs(self, size: Sequence[int]) -> torch.Tensor:
        """Return attention by position as an explicit map.

        Args:
            size: Size of the input along each axis, without padding.

        Returns:
            Probabilities, at least float32, shape (heads, q_1, ..., q_K, k_1, ..., k_K). Queries are output pixels,
            keys are pixels of the padded input.
        """
        widths, dims = self.pad_widths[::-1], len(self.kernel_size)
        factors = self.axis_factors([n + sum(widths[2 * i:2 * i + 2]) for i, n in enumerate(size)])
        operands = [a for i, factor in enumerate(factors) for a in (factor, [0, 1 + i, 1 + dims + i])]
        return torch.einsum(*operands, list(range(1 + 2 * dims)))

    def attend(self, x: torch.Tensor, factors: Sequence[torch.Tensor], heads: slice) -> torch.Tensor:
        """Return the part of the output from some heads, shape (out_channels, B, q_1, ..., q_K).

        Args:
            x: Input, shape (n_1, ..., n_K, in_channels, B).
            factors: Attention of these heads along each axis, shapes (heads, q_i, n_i).
            heads: Slice of the heads.
        """
        size, batch, groups = x.shape[:-2], x.shape[-1], self.groups
        weight = self.value_weight[heads].unflatten(1, (groups, -1)).to(x.dtype)  # some einsums ignore autocast
        # values first if they have fewer channels
        if self.out_channels < self.in_channels:
            pixels = x.reshape(prod(size), groups, weight.shape[3], batch)
            values = torch.einsum('ngcb,hgdc->hngdb', pixels, weight)
            return gather(values.reshape(len(weight), *size, self.out_channels, batch), factors).sum(dim=0)
        gathered = gather(x[None], factors)
        shape = self.out_channels, *gathered.shape[2:]
        return torch.einsum('hgcm,hgdc->gdm', gathered.flatten(2).unflatten(1, (groups, -1)), weight).reshape(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve x, shape (B, in_channels, n_1, ..., n_K) or without B."""
        dims = len(self.kernel_size)
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-1 - dims] != self.in_channels:
            raise ValueError(
                f'x of shape {list(x.shape)}: needs {self.in_channels} channels, then {dims} axes, and at '
                'most one axis before them')
        if x.dim() == dims + 1:
            return self.forward(x[None])[0]

        widths, before = self.pad_widths, [0] * dims
        padded = [n + sum(widths[-2 - 2 * i:][:2]) for i, n in enumerate(x.shape[2:])]
        if self.padding_mode != 'zeros':
            x = F.pad(x, widths, self.padding_mode)
        else:  # zeros only take a share of the softmax
            before = widths[-2::-2]
        batch, size = x.shape[0], x.shape[2:]
        factors = [factor.narrow(2, *keys) for factor, *keys in zip(self.axis_factors(padded), before, size)]
        if dims == 2 and self.groups == 1 and self.num_heads <= AT_ONCE and self.in_channels <= self.out_channels:
            rows, cols = factors
            maps = maps_of_factors(rows, cols) if FEW_KEYS * prod(size) <= self.out_channels else None
            elements = self.num_heads * self.in_channels * rows.shape[1] * cols.shape[1]
            weight, parts = self.value_weight.transpose(0, 1).flatten(1), []
            for pixels in image_chunks(x.permute(0, 2, 3, 1), elements):
                if maps is None:
                    gathered = gather_by_factors(rows, cols, pixels)
                else:
                    gathered = gather_by_maps(maps, pixels, cols.shape[1])
                parts.append(F.linear(gathered, weight, self.bias).permute(0, 3, 1, 2))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        outputs = batch * self.out_channels * prod([factor.shape[1] for factor in factors])
        per_head = batch * min(self.in_channels, self.out_channels) * prod(size)
        step = max(1, max(OUTPUTS * outputs, ELEMENTS) // max(1, per_head))

        x = x.permute(*range(2, dims + 2), 1, 0).contiguous().to(product_dtype(x))
        out = x.new_zeros(())
        for start in range(0, self.num_heads, step):
            part = self.attend(x, [f[start:start + step] for f in factors], slice(start, start + step))
            out = out + at_least_float32(part)  # half precision would round each partial sum
        out = out.to(part.dtype).transpose(0, 1)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).view(-1, *[1] * dims)
        return out.contiguous()
