"""From attention to convolution: the Conv2d nearest to a layer that attends by position only.

Each head is a convolution with one channel matrix for all taps, except at the border, where softmax has fewer keys.
"""
import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.models._input import get_model_input_config
from torchvision.transforms.functional import center_crop

from timm_selfconv.layers import ConvAttention, LearnedEncoding, SelfAttention2d
from timm_selfconv.layers.conv_attention import CONVS, Conv, pad_widths, tap_centers
from timm_selfconv.models import SelfAttentionNet

__all__ = ['ConvReport', 'ConvNhwc', 'attention_to_conv', 'head_kernels', 'reparameterizable']

PaddingMode = Literal['zeros', 'reflect', 'replicate', 'circular']
MASS = 0.999  # share of every head's attention inside a kernel of the default size


@dataclass(frozen=True)
class ConvReport:
    """Distance between a convolution and the attention that it replaces.

    Attributes:
        kernel_size: Size of the kernel along each axis.
        mass: Share of each head's attention inside the kernel; learned encodings use the central query.
        interior_error: Relative error, without the bias, where the whole kernel is on the grid; None without such
            pixels.
        border_error: The same for the other pixels.
    """
    kernel_size: Tuple[int, ...]
    mass: Tuple[float, ...]
    interior_error: Optional[float]
    border_error: Optional[float]


def check_position_only(attn: nn.Module) -> SelfAttention2d:
    if not isinstance(attn, SelfAttention2d):
        raise ValueError(f'attn={type(attn).__name__}: needs a SelfAttention2d or a ConvAttention')
    if attn.terms != ('position',):
        raise ValueError("attn: its attention depends on content; needs terms=('position',)")
    return attn


def head_kernels(attn: nn.Module, kernel_size: Tuple[int, int]) -> torch.Tensor:
    """Softmax of each head over the offsets of a kernel.

    Args:
        attn: A :class:`SelfAttention2d` with the position term only.
        kernel_size: Rows and columns, odd.

    Returns:
        One kernel per head, which sums to 1, float64, shape (heads, rows, columns).

    Raises:
        ValueError: If the layer attends by content, or a learned encoding has no such offsets.
    """
    # weights that sum to 1 keep the mean of the inputs; the least squares solution for white inputs does not
    reach = kernel_size[0] // 2, kernel_size[1] // 2
    rows, cols, cross = check_position_only(attn).encoding.offset_tables(reach[0] + 1, reach[1] + 1)
    d1, d2 = (torch.arange(-n, n + 1) for n in reach)
    scores = rows[:, :, None] + cols[:, None] + cross[:, None, None] * d1[:, None] * d2
    return scores.flatten(1).softmax(dim=-1).view_as(scores).detach()


def held_mass(patterns: torch.Tensor, kernel_size: Tuple[int, int]) -> torch.Tensor:
    """Sum of each pattern, shape (heads, rows, columns), inside a centred kernel."""
    return center_crop(patterns, list(kernel_size)).sum(dim=(1, 2))


def choose_kernel_size(patterns: torch.Tensor, largest: Tuple[int, int]) -> Tuple[int, int]:
    sizes = [(min(side, largest[0]), min(side, largest[1])) for side in range(1, max(largest), 2)]
    return next((size for size in sizes if bool((held_mass(patterns, size) >= MASS).all())), largest)


def relative_errors(
        attn: SelfAttention2d, conv: nn.Conv2d, inputs: torch.Tensor) -> Tuple[Optional[float], Optional[float]]:
    with torch.no_grad():
        expected = attn(inputs)
        difference = ConvNhwc(conv)(inputs) - expected
        expected = expected - conv.bias
    taps = F.conv2d(inputs.new_ones(1, 1, *inputs.shape[1:3]), inputs.new_ones(1, 1, *conv.kernel_size), padding='same')
    inside = taps[0, 0] == prod(conv.kernel_size)

    def relative(pixels: torch.Tensor) -> Optional[float]:
        return float(difference[:, pixels].norm() / expected[:, pixels].norm()) if pixels.any() else None

    return relative(inside), relative(~inside)


def conv_attention_to_conv(attn: ConvAttention, inputs: Optional[torch.Tensor]) -> Tuple[Conv, ConvReport]:
    """The convolution nearest to a :class:`ConvAttention`. Padded pixels are keys, so all pixels are interior."""
    if attn.content:
        raise ValueError(f'attn: a ConvAttention with content={attn.content} is no convolution')
    double = copy.deepcopy(attn).cpu().double()  # not every device has float64
    taps = tap_centers(attn.kernel_size, attn.dilation).to(double.centers)
    conv_cls: Any = CONVS[taps.shape[1] - 1]
    conv = conv_cls(
        attn.in_channels, attn.out_channels, attn.kernel_size, attn.stride, attn.padding, attn.dilation, attn.groups,
        attn.bias is not None, attn.padding_mode).to(taps).train(attn.training)
    if inputs is None:
        extents = (taps.amax(dim=0) - taps.amin(dim=0)).long() + max(pad_widths(attn)) + 4
        inputs = torch.randn(2, attn.in_channels, *extents.tolist(), generator=torch.Generator().manual_seed(0))
    reach = max(*inputs.shape[-taps.shape[1]:], int(taps.abs().max()))
    offsets = torch.arange(-reach, reach + 1).to(taps)
    with torch.no_grad():
        spreads = double.spreads[:, None, None]
        scores = -0.5 * (spreads * (taps - double.centers[:, None])).square().sum(dim=-1)
        weight = torch.einsum('ht,hoc->oct', scores.softmax(dim=-1), double.value_weight).reshape(conv.weight.shape)
        conv.load_state_dict({'weight': weight} if double.bias is None else {'weight': weight, 'bias': double.bias})

        axis_scores = -0.5 * (spreads * (offsets - double.centers[..., None])).square()  # (heads, axes, offsets)
        mass = (scores.logsumexp(dim=-1) - axis_scores.logsumexp(dim=-1).sum(dim=-1)).exp()
        expected = double(inputs.to(taps))
        bias = 0. if double.bias is None else double.bias.view(-1, *[1] * taps.shape[1])
        error = float((conv(inputs.to(taps)) - expected).norm() / (expected - bias).norm())
    report = ConvReport(tuple(attn.kernel_size), tuple(mass.tolist()), error, None)
    return conv.to(attn.value_weight), report


def attention_to_conv(
        attn: nn.Module,
        kernel_size: Optional[Union[int, Tuple[int, int]]] = None,
        grid_size: Optional[Tuple[int, int]] = None,
        inputs: Optional[torch.Tensor] = None,
        padding_mode: Optional[PaddingMode] = None,
) -> Tuple[Conv, ConvReport]:
    """The convolution nearest to a layer that attends by position only.

    Its weight is the sum over heads of the kernel (:func:`head_kernels`) times the value matrix and the projection.

    Args:
        attn: A :class:`SelfAttention2d` with the position term only, or a :class:`ConvAttention` (only ``inputs``).
        kernel_size: Side, or rows and columns, odd. Default: the smallest square with 99.9 % of every head's attention,
            at most the grid.
        grid_size: Rows and columns of the images. Default: from the inputs or a learned encoding, else 16 x 16.
        inputs: Inputs to measure errors on, shape (B, H, W, dim), or channels first for a :class:`ConvAttention`.
            Default: white noise.
        padding_mode: Default: 'replicate' for quadratic encodings, 'reflect' for learned ones.

    Returns:
        The convolution, channels first, in the layer's dtype and device, and its distance from the attention.

    Raises:
        ValueError: If the layer attends by content, an argument is out of range, or a Linear is adapted or hooked.
    """
    if isinstance(attn, ConvAttention):
        if (kernel_size, grid_size, padding_mode) != (None, None, None):
            raise ValueError(
                f'kernel_size={kernel_size}, grid_size={grid_size}, padding_mode={padding_mode}: leave them out, a '
                'ConvAttention has its own')
        return conv_attention_to_conv(attn, inputs)
    attn = check_position_only(attn)
    if inputs is not None and (inputs.dim() != 4 or inputs.shape[-1] != attn.dim):
        raise ValueError(f'inputs of shape {list(inputs.shape)}: needs the shape (batch, height, width, {attn.dim})')
    learned = isinstance(attn.encoding, LearnedEncoding)
    if grid_size is None:
        if inputs is not None:
            grid_size = inputs.shape[1], inputs.shape[2]
        elif learned:
            grid_size = (len(attn.encoding.row_table) + 1) // 2, (len(attn.encoding.col_table) + 1) // 2
        else:
            grid_size = 16, 16
    height, width = grid_size
    odd = height - 1 + height % 2, width - 1 + width % 2
    largest = odd if learned else (2 * height - 1, 2 * width - 1)
    patterns = head_kernels(attn, largest)
    kernel = choose_kernel_size(patterns, odd) if kernel_size is None else to_2tuple(kernel_size)
    if any(side % 2 == 0 or not 1 <= side <= limit for side, limit in zip(kernel, largest)):
        raise ValueError(f'kernel_size={kernel_size}: needs odd numbers up to {largest} on a grid of {grid_size}')

    double = SelfAttention2d.fuse(copy.deepcopy(attn).cpu().double())  # a reparameterizable layer has another fuse
    value = double.value.weight.detach().view(attn.dim, attn.num_heads, attn.dim)
    weight = torch.einsum('ohc,hij->ocij', value, head_kernels(attn, kernel))
    if padding_mode is None:
        padding_mode = 'reflect' if learned else 'replicate'
    padding = kernel[0] // 2, kernel[1] // 2
    conv = nn.Conv2d(attn.dim, attn.dim, kernel, padding=padding, padding_mode=padding_mode).to(weight)
    conv.load_state_dict(dict(weight=weight, bias=double.value.bias))
    if inputs is None:
        inputs = torch.randn(2, *grid_size, attn.dim, generator=torch.Generator().manual_seed(0))
    mass = tuple(held_mass(patterns, kernel).tolist())
    report = ConvReport(kernel, mass, *relative_errors(double, conv, inputs.to(weight)))
    return conv.to(next(attn.parameters())), report


class ConvNhwc(nn.Module):
    """A convolution that replaces a :class:`SelfAttention2d`, channels last."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Convolve x, shape (B, H, W, dim); keys are ignored."""
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def as_conv(attn: nn.Module, **kwargs: Any) -> ConvNhwc:
    return ConvNhwc(attention_to_conv(attn, **kwargs)[0]).train(attn.training)


def reparameterizable(
        model: nn.Module,
        kernel_size: Optional[int] = None,
        padding_mode: Optional[PaddingMode] = None,
) -> SelfAttentionNet:
    """Copy a net so that timm's `reparameterize_model` replaces its attention by the nearest convolutions.

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged. Layers that attend by content stay attention.
        kernel_size: Side of the kernels; see :func:`attention_to_conv`.
        padding_mode: See :func:`attention_to_conv`.

    Returns:
        The copy.

    Raises:
        ValueError: If it is another kind of net, or has no layer that attends by position only.
    """
    if not isinstance(model, SelfAttentionNet):
        raise ValueError(f'model={type(model).__name__}: needs a SelfAttentionNet')
    grid_size: Optional[Tuple[int, int]] = None
    if hasattr(model, 'pretrained_cfg'):  # made by timm, which keeps the image size there
        height, width = get_model_input_config(model)['input_size'][1:]
        grid_size = height // model.patch_size, width // model.patch_size
    model = copy.deepcopy(model)
    layers: Any = [m for m in model.modules() if isinstance(m, SelfAttention2d) and m.terms == ('position',)]
    if not layers:
        raise ValueError("model: attention depends on content in all layers; needs terms=('position',)")
    for attn in layers:  # timm calls fuse(); a deep copy of the layer copies the partial with it
        attn.fuse = partial(as_conv, attn, kernel_size=kernel_size, grid_size=grid_size, padding_mode=padding_mode)
    return model
