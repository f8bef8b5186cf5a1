"""From convolution to attention: Theorem 1 of the paper, as a module that computes what the convolution did.

Lemma 1: a convolution is attention if each head attends to one pixel at a fixed offset from the query, that of a kernel
tap, and has the tap's weights for values. Lemma 2: scores in the quadratic encoding attend like that in the limit of
sharp Gaussians. The paper's remarks carry over one to one: the input is padded as the convolution pads it, and what is
padded is a key like any other; a stride keeps every so many queries; a dilation moves the heads apart.
"""
import torch
import torch.nn as nn

from timm_selfconv.layers import ConvAttention
from timm_selfconv.layers.conv_attention import CONVS, Conv, tap_centers

__all__ = ['conv_to_attention']


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


def conv_to_attention(conv: nn.Module, alpha: float = 46., content: int = 0) -> ConvAttention:
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
        content: Channels of queries and keys by which heads can learn to look at content as well (equation 8); 0 for
            none. Queries begin at zero, so that the function is the same. Of convolutions of two axes and one group.

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
    return ConvAttention(conv, alpha, content)
