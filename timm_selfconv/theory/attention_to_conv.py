"""From attention to convolution: an approximation of layers that attend by position only.

Each head is a convolution with one channel matrix for all taps, except at the border, where softmax has fewer keys.
"""
import copy
from typing import Any, Literal, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.models._input import get_model_input_config
from torchvision.transforms.functional import center_crop

from timm_selfconv.layers import ConvAttention, LearnedEncoding, SelfAttention2d
from timm_selfconv.layers.conv_attention import CONVS, Conv, tap_centers
from timm_selfconv.layers.parameters import check_dense
from timm_selfconv.models import SelfAttentionNet
from .pruning import check_net
from .residual import check_kernel_size

__all__ = ['ConvNhwc', 'attention_to_conv', 'attention_to_convs', 'head_kernels']

PaddingMode = Literal['zeros', 'reflect', 'replicate', 'circular']
MASS = 0.999  # share of every head's attention inside a kernel of the default size


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


def choose_kernel_size(patterns: torch.Tensor, largest: Tuple[int, int]) -> Tuple[int, int]:
    """Return the smallest square, at most ``largest``, with enough of each pattern, shape (heads, rows, columns)."""
    for side in range(1, max(largest), 2):
        size = min(side, largest[0]), min(side, largest[1])
        if bool((center_crop(patterns, list(size)).sum(dim=(1, 2)) >= MASS).all()):
            return size
    return largest


@torch.no_grad()
def relative_error(conv: nn.Module, attn: nn.Module, *shape: int) -> float:
    """Return the relative error of a convolution, without its bias, for noise of variance 1."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(conv.parameters()))
    expected = attn(x)
    return float((conv(x) - expected).norm() / (expected - conv(0 * x)).norm())


@torch.no_grad()
def conv_attention_to_conv(attn: ConvAttention) -> Tuple[Conv, float]:
    double = copy.deepcopy(attn).cpu().double()  # not every device has float64
    taps = tap_centers(attn.kernel_size, attn.dilation).to(double.centers)
    distance = double.spreads[:, None, None] * (taps - double.centers[:, None])
    kernels = (-0.5 * distance.square().sum(dim=-1)).softmax(dim=-1)  # (heads, taps)
    conv_cls: Any = CONVS[taps.shape[1] - 1]
    conv = conv_cls(
        attn.in_channels, attn.out_channels, attn.kernel_size, attn.stride, attn.padding, attn.dilation, attn.groups,
        attn.bias is not None, attn.padding_mode).to(taps).train(attn.training)
    conv.weight.copy_(torch.einsum('ht,hoc->oct', kernels, double.value_weight).view_as(conv.weight))
    if double.bias is not None:
        conv.bias.copy_(double.bias)
    size = [d * (k - 1) + max(attn.pad_widths) + 4 for k, d in zip(attn.kernel_size, attn.dilation)]
    error = relative_error(conv, double, 2, attn.in_channels, *size)
    return conv.to(attn.value_weight), error


def attention_to_conv(
        attn: nn.Module,
        kernel_size: Optional[Union[int, Tuple[int, int]]] = None,
        grid_size: Optional[Tuple[int, int]] = None,
        padding_mode: Optional[PaddingMode] = None,
) -> Tuple[Conv, float]:
    """Approximate a layer that attends by position only by a convolution.

    Its weight is the sum over heads of the kernel (:func:`head_kernels`) times the value matrix and the projection.

    Args:
        attn: A :class:`SelfAttention2d` with the position term only, or a :class:`ConvAttention`, which has its own
            kernel and padding.
        kernel_size: Side, or rows and columns, odd. Default: the smallest square with 99.9 % of every head's attention,
            at most the grid.
        grid_size: Rows and columns of the images. Default: from a learned encoding, else 16 x 16.
        padding_mode: Default: 'replicate' for quadratic encodings, 'reflect' for learned ones.

    Returns:
        The convolution, channels first, in the layer's dtype and device, and its relative error, without the bias, for
        noise of variance 1.

    Raises:
        ValueError: If the layer attends by content, an argument is out of range, or a Linear is adapted or hooked.
    """
    if isinstance(attn, ConvAttention):
        if (kernel_size, grid_size, padding_mode) != (None, None, None):
            raise ValueError(
                f'kernel_size={kernel_size}, grid_size={grid_size}, padding_mode={padding_mode}: leave them out, a '
                'ConvAttention has its own')
        return conv_attention_to_conv(attn)
    attn = check_position_only(attn)
    learned = isinstance(attn.encoding, LearnedEncoding)
    if grid_size is None and learned:
        grid_size = (len(attn.encoding.row_table) + 1) // 2, (len(attn.encoding.col_table) + 1) // 2
    height, width = grid_size or (16, 16)
    odd = height - 1 + height % 2, width - 1 + width % 2
    largest = odd if learned else (2 * height - 1, 2 * width - 1)
    if kernel_size is None:
        kernel_size = choose_kernel_size(head_kernels(attn, largest), odd)
    kernel = check_kernel_size(kernel_size)
    if any(side % 2 == 0 or side > limit for side, limit in zip(kernel, largest)):
        raise ValueError(f'kernel_size={kernel_size}: needs odd numbers up to {largest} on a grid of {height, width}')

    double = copy.deepcopy(attn).cpu().double().fuse()
    value = double.value.weight.detach().view(attn.dim, attn.num_heads, attn.dim)
    weight = torch.einsum('ohc,hij->ocij', value, head_kernels(attn, kernel))
    if padding_mode is None:
        padding_mode = 'reflect' if learned else 'replicate'
    padding = kernel[0] // 2, kernel[1] // 2
    conv = nn.Conv2d(attn.dim, attn.dim, kernel, padding=padding, padding_mode=padding_mode).to(weight)
    conv.load_state_dict(dict(weight=weight, bias=double.value.bias))
    error = relative_error(ConvNhwc(conv), double, 2, height, width, attn.dim)
    return conv.to(next(attn.parameters())), error


class ConvNhwc(nn.Module):
    """A convolution that replaces a :class:`SelfAttention2d`, channels last."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Convolve x, shape (B, H, W, dim); keys are ignored."""
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def attention_to_convs(
        model: nn.Module,
        kernel_size: Optional[int] = None,
        padding_mode: Optional[PaddingMode] = None,
) -> SelfAttentionNet:
    """Copy a net and approximate its attention by convolutions, see :func:`attention_to_conv`.

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged. Layers that attend by content stay attention.
        kernel_size, padding_mode: See :func:`attention_to_conv`.

    Raises:
        ValueError: If it is another kind of net, or has no layer that attends by position only.
    """
    net = check_net(model)
    check_dense(net, ('value', 'proj'))
    convnet = copy.deepcopy(net)
    grid_size: Optional[Tuple[int, int]] = None
    if hasattr(convnet, 'pretrained_cfg'):  # made by timm, which keeps the image size there
        height, width = get_model_input_config(convnet)['input_size'][1:]
        grid_size = height // convnet.patch_size, width // convnet.patch_size
    by_position = [block for block in convnet.blocks if block.attn.terms == ('position',)]
    if not by_position:
        raise ValueError("model: attention depends on content in all layers; needs terms=('position',)")
    for block in by_position:
        conv, _ = attention_to_conv(block.attn, kernel_size, grid_size, padding_mode)
        block.attn = ConvNhwc(conv).train(block.attn.training)
    return convnet
