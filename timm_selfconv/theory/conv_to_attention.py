"""From convolutions to attention: Theorem 1 of the paper, for one convolution or those of a net.

Lemma 1: a convolution is attention if each head attends to one pixel at a fixed offset from the query, that of a kernel
tap, and has the tap's weights for values. Lemma 2: scores in the quadratic encoding attend like that in the limit of
sharp Gaussians. The paper's remarks carry over one to one: the input is padded as the convolution pads it, and what is
padded is a key like any other; a stride keeps every so many queries; a dilation moves the heads apart.
"""
import copy
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import Conv2dSame
from timm.layers.padding import pad_same
from timm.models._input import get_model_input_config
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers import ConvAttention
from timm_selfconv.layers.conv_attention import CONVS, Conv, tap_centers
from timm_selfconv.layers.functional import hooked
from timm_selfconv.layers.parameters import keep_from_decay, no_weight_decay

__all__ = ['ConversionReport', 'conv_to_attention', 'convs_to_attention']

Where = Union[str, Sequence[str], Callable[[str, nn.Module], bool], None]


def check_conv(conv: nn.Module) -> Conv:
    """Return a convolution, or raise a ValueError if a module is none or computes more than one with its weight."""
    name = type(conv).__name__
    if not isinstance(conv, CONVS):
        raise ValueError(f'conv={name}: needs an nn.Conv1d, nn.Conv2d or nn.Conv3d')
    if nn.parameter.is_lazy(conv.weight):
        raise ValueError(f'conv={name}: is lazy and needs to have seen an input first')
    kind = next(kind for kind in CONVS if isinstance(conv, kind))
    if any(getattr(getattr(conv, f), '__func__', None) is not getattr(kind, f) for f in ('forward', '_conv_forward')):
        raise ValueError(f'conv={name}: has a forward of its own, needs that of nn.{kind.__name__}')
    names = {name for name, _ in conv.named_parameters()}
    if names not in ({'weight'}, {'weight', 'bias'}) or hooked(conv):
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


@dataclass(frozen=True)
class ConversionReport:
    """A net before and after its convolutions became attention.

    Both see one input, noise of variance 1, in eval mode. FLOPs are counted as torch's FlopCounterMode does it: 2 x the
    multiply-adds of all convolutions and products of matrices.

    Attributes:
        convs: Convolutions replaced; one that a net uses twice is one.
        heads: Heads of all that stands for them.
        error: Norm of the difference of the nets' outputs over the norm of the first one's.
    """
    convs: int
    heads: int
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    error: float

    def __str__(self) -> str:
        convs = '1 convolution is' if self.convs == 1 else f'{self.convs} convolutions are'
        more, flops = self.parameters_after - self.parameters_before, self.flops_after / self.flops_before
        return (
            f'{convs} {self.heads} heads; {more} more parameters; {flops:.1f} times the FLOPs; error {self.error:.0e}')


class PadSame(nn.Module):
    """Pad as TensorFlow does, by what the input's size leaves over: what timm's Conv2dSame does before it convolves."""

    def __init__(self, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]):
        super().__init__()
        self.kernel_size, self.stride, self.dilation = list(kernel_size), list(stride), list(dilation)

    def extra_repr(self) -> str:
        return f'kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pad_same(x, self.kernel_size, self.stride, self.dilation)


def to_attention(conv: Any, alpha: float, content: int) -> nn.Module:
    """Like :func:`conv_to_attention`, for timm's Conv2dSame too, of which it makes a plain Conv2d."""
    pads = type(conv) is Conv2dSame
    if not pads:
        return conv_to_attention(conv, alpha, content)
    pad = PadSame(conv.kernel_size, conv.stride, conv.dilation)
    conv.__class__ = nn.Conv2d
    return nn.Sequential(pad, conv_to_attention(conv, alpha, content)).train(conv.training)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern fits the name of a module or of one that it is in; see :func:`convs_to_attention`."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f'{p}.*') for p in patterns)


def measure(model: nn.Module, input_size: Sequence[int]) -> Tuple[int, List[str], torch.Tensor]:
    """FLOPs of a net (:class:`ConversionReport`), names of the innermost modules that convolve in it, and its output.

    A net that convolves itself goes by its class; the output is one row of all its tensors, in float64 on the CPU.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    x = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(x.to(next(model.parameters())))
    flops = counter.get_flop_counts()
    names = [name for name in flops if name != 'Global' and torch.ops.aten.convolution in flops[name]]
    inner = [n for n in names if not any(m.startswith(n + '.') for m in names)]
    row = torch.cat([t.flatten().cpu().double() for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
    return counter.get_total_flops(), [n.partition('.')[2] or n for n in inner], row


def convs_to_attention(
        model: nn.Module,
        where: Where = None,
        alpha: float = 46.,
        content: int = 0,
        input_size: Optional[Sequence[int]] = None,
) -> Tuple[nn.Module, ConversionReport]:
    """Replace convolutions of a net, all or some, by the attention that they are; see :func:`conv_to_attention`.

    To train such a net on, let its heads move: with an alpha of 3 they give their tap 0.83 of their attention, and the
    rest to its neighbours. The report says what that costs on noise; images, which are smooth, lose less.

    Args:
        model: A net that convolves by modules: nn.Conv1d, Conv2d, Conv3d and timm's Conv2dSame. It is left as it is.
        where: Which of them: names of modules or patterns (``'layer4'``, ``['layer3', 'layer4.*.conv2']``) that name
            the convolution or what it is in, or a function of a name and a module; by default all.
        alpha: Inverse width of the heads' Gaussians.
        content: Channels of queries and keys by which heads can learn to look at content; 0 for none.
        input_size: Size of one input, e.g. channels, height and width, to measure with; by default the one that the
            net's timm configuration names, or 3 x 224 x 224.

    Returns:
        A copy of the net, the same in all but these convolutions, and what it costs.

    Raises:
        ValueError: If no convolution is chosen, or none by one of the names or patterns, or some are that can't be
            replaced: transposed, with a forward of their own (weight standardisation), with weights that other modules
            use too, or by a function.
    """
    if input_size is None:
        input_size = get_model_input_config(model)['input_size']
    attention = copy.deepcopy(model)
    patterns = [] if callable(where) else ['*'] if where is None else [where] if isinstance(where, str) else list(where)
    users = Counter(p for m in attention.modules() for p in m.parameters(recurse=False))
    replaced: Dict[nn.Module, nn.Module] = {}
    taken, kept = [], []
    for name, conv in attention.named_modules():
        if isinstance(conv, _ConvNd):
            if not (where(name, conv) if callable(where) else matches(name, patterns)):
                kept.append(name or type(conv).__name__)
                continue
            if any(users[p] > 1 for p in conv.parameters()):
                raise ValueError(f'model: convolution {name!r} shares parameters with another module, needs its own')
            try:
                replaced[conv] = to_attention(conv, alpha, content)
            except ValueError as e:
                raise ValueError(f'model: convolution {name!r}: {e}') from e
            taken.append(name)
    idle = [p for p in patterns if not any(matches(name, [p]) for name in taken)]
    if not taken or idle:
        raise ValueError(f'model={type(model).__name__}: has no convolutions' + (
            f' in where={idle or where!r}, but in {", ".join(kept)}' if kept else ''))
    for name, module in list(attention.named_modules(remove_duplicate=False)):
        if module in replaced and name:
            attention.set_submodule(name, replaced[module])
    attention = replaced.get(attention, attention)
    keep_from_decay(attention, no_weight_decay(attention))

    flops_before, _, expected = measure(model, input_size)
    flops_after, convolving, out = measure(attention, input_size)
    functions = [n for n in convolving if n not in kept and matches(n, patterns)]  # a function chooses modules only
    if functions:
        raise ValueError(
            f'model: convolves by functions, not by modules to replace, in {", ".join(functions)}; where can leave '
            'these out')
    return attention, ConversionReport(
        convs=len(replaced),
        heads=sum(m.num_heads for m in attention.modules() if isinstance(m, ConvAttention)),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in attention.parameters()),
        flops_before=flops_before,
        flops_after=flops_after,
        error=float((out - expected).norm() / expected.norm().clamp(min=1e-300)),  # some give zeros before training
    )
