"""From convolutions to attention: Theorem 1 of the paper, for one convolution or all convolutions of a net.

Lemma 1: a convolution is attention with one head per kernel tap. The head attends to the tap's offset, and its values
are the tap's weights. Lemma 2: the quadratic encoding reaches this in the limit of sharp Gaussians.
"""
import copy
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import Conv2dSame
from timm.layers.padding import pad_same
from timm.models._input import get_model_input_config
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers import ConvAttention
from timm_selfconv.layers.conv_attention import CONVS, tap_centers
from timm_selfconv.layers.hooks import hooked
from timm_selfconv.layers.parameters import keep_from_decay, no_weight_decay

__all__ = ['ConversionReport', 'conv_to_attention', 'convs_to_attention']


def conv_to_attention(conv: nn.Module, alpha: float = 46.) -> ConvAttention:
    """Convert a convolution to self-attention by Theorem 1 of the paper.

    With K axes an output differs by about ``2 K exp(-alpha)`` of the largest pixel, which is below float64's rounding
    from alpha = 39 on. (The paper derives 46 from float32's smallest positive number.)

    Args:
        conv: An nn.Conv1d, Conv2d or Conv3d, which stays unchanged.
        alpha: Sharpness of the heads' scores ``-alpha |delta - Delta|^2`` (Lemma 2), in 1 / pixels^2, at most 1e9.

    Returns:
        The attention, in the convolution's mode, dtype and device; frozen parameters stay frozen.

    Raises:
        ValueError: If the module is no plain convolution (parametrized, pruned, hooked, with another forward), or
            alpha is out of range.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1e9:
        raise ValueError(f'alpha={alpha!r}: needs a number above 0 and at most 1e9')  # more overflows in half precision
    name = type(conv).__name__
    if not isinstance(conv, CONVS):
        raise ValueError(f'conv={name}: needs an nn.Conv1d, nn.Conv2d or nn.Conv3d')
    kind = next(kind for kind in CONVS if isinstance(conv, kind))
    if any(getattr(getattr(conv, f), '__func__', None) is not getattr(kind, f) for f in ('forward', '_conv_forward')):
        raise ValueError(f'conv={name}: has a custom forward, needs the forward of nn.{kind.__name__}')
    parameters = {parameter for parameter, _ in conv.named_parameters()}
    if parameters not in ({'weight'}, {'weight', 'bias'}) or hooked(conv):
        raise ValueError(f'conv={name}: is parametrized, pruned or hooked; remove that first, or make it permanent')
    centers = tap_centers(conv.kernel_size, conv.dilation)
    if not torch.equal(centers.to(conv.weight.dtype).to(centers.dtype), centers):
        raise ValueError(
            f'dilation={conv.dilation}: {conv.weight.dtype} cannot represent the tap offsets; convert in float32')
    return ConvAttention(conv, alpha)


@dataclass(frozen=True)
class ConversionReport:
    """Costs and error of a net after its convolutions became attention.

    Attributes:
        convs: Number of convolutions replaced.
        heads: Number of heads in their place.
        flops_before: Twice the multiply-adds of convolutions and matrix products (torch's FlopCounterMode), one input.
        error: Relative error of the output in eval mode for noise of variance 1.
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
    """TensorFlow's padding, which depends on the input size, as in timm's Conv2dSame."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.sizes = list(conv.kernel_size), list(conv.stride), list(conv.dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pad_same(x, *self.sizes)


def to_attention(conv: Any, alpha: float) -> nn.Module:
    pads = type(conv) is Conv2dSame
    if not pads:
        return conv_to_attention(conv, alpha)
    plain = nn.Conv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, dilation=conv.dilation, groups=conv.groups,
        device='meta')
    plain.weight, plain.bias = conv.weight, conv.bias
    return nn.Sequential(PadSame(conv), conv_to_attention(plain, alpha)).train(conv.training)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f'{p}.*') for p in patterns)


def measure(model: nn.Module, input_size: Sequence[int]) -> Tuple[int, List[str], torch.Tensor]:
    """FLOPs of a net, names of its innermost modules that convolve, and all its outputs as one row in float64."""
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
        where: Union[str, Sequence[str], None] = None,
        alpha: float = 46.,
        input_size: Optional[Sequence[int]] = None,
) -> Tuple[nn.Module, ConversionReport]:
    """Replace all or some convolutions of a net by attention, see :func:`conv_to_attention`.

    Args:
        model: A net with nn.Conv1d, Conv2d, Conv3d or timm's Conv2dSame modules, which stays unchanged.
        where: Convolutions to replace: names or patterns of the convolution or of a module that holds it
            (``'layer4'``, ``['layer3', 'layer4.*.conv2']``). Default: all.
        alpha: Sharpness of the heads. At 3, a start for training, a head gives its tap 0.83 of its attention.
        input_size: Size of one input for the report, for example (channels, height, width). Default: from the net's
            timm configuration, or 3 x 224 x 224.

    Returns:
        A copy of the net with attention, and a report.

    Raises:
        ValueError: If no convolution is chosen, a pattern matches none, or one is no plain module: transposed, with
            another forward (weight standardisation), with shared weights, or called as a function.
    """
    if input_size is None:
        input_size = get_model_input_config(model)['input_size']
    attention = copy.deepcopy(model)
    patterns = ['*'] if where is None else [where] if isinstance(where, str) else list(where)
    users = Counter(p for m in attention.modules() for p in m.parameters(recurse=False))
    convs = {name: m for name, m in attention.named_modules() if isinstance(m, _ConvNd)}
    chosen = {name: conv for name, conv in convs.items() if matches(name, patterns)}
    kept = [name or type(conv).__name__ for name, conv in convs.items() if name not in chosen]
    replaced: Dict[nn.Module, nn.Module] = {}
    for name, conv in chosen.items():
        if any(users[p] > 1 for p in conv.parameters()):
            raise ValueError(f'model: convolution {name!r} shares parameters with another module, needs its own')
        try:
            replaced[conv] = to_attention(conv, alpha)
        except ValueError as e:
            raise ValueError(f'model: convolution {name!r}: {e}') from e
    idle = [p for p in patterns if not any(matches(name, [p]) for name in chosen)]
    if not chosen or idle:
        raise ValueError(f'model={type(model).__name__}: has no convolutions' + (
            f' in where={idle or where!r}, but in {", ".join(kept)}' if kept else ''))
    for name, module in list(attention.named_modules(remove_duplicate=False)):
        if module in replaced and name:
            attention.set_submodule(name, replaced[module])
    attention = replaced.get(attention, attention)
    keep_from_decay(attention, no_weight_decay(attention))

    flops_before, _, expected = measure(model, input_size)
    flops_after, convolving, out = measure(attention, input_size)
    functions = [n for n in convolving if n not in kept and matches(n, patterns)]
    if functions:
        raise ValueError(
            f'model: functional convolutions in {", ".join(functions)} cannot be replaced; where can exclude these '
            'modules')
    return attention, ConversionReport(
        convs=len(replaced),
        heads=sum(m.num_heads for m in attention.modules() if isinstance(m, ConvAttention)),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in attention.parameters()),
        flops_before=flops_before,
        flops_after=flops_after,
        error=float((out - expected).norm() / expected.norm().clamp(min=1e-300)),  # some give zeros before training
    )
