"""From convolutional nets to attention: Theorem 1 for all convolutions of a net, and what it costs."""
import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.layers import Conv2dSame
from timm.layers.padding import pad_same
from timm.models._input import get_model_input_config
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from .conv_to_attention import ConvAttention, conv_to_attention

__all__ = ['ConversionReport', 'convs_to_attention']


@dataclass(frozen=True)
class ConversionReport:
    """A net before and after its convolutions became attention.

    FLOPs are those of one input in eval mode as torch's FlopCounterMode counts them: 2 x the multiply-adds of all
    convolutions and products of matrices.

    Attributes:
        convs: Convolutions replaced; one that a net uses twice is one.
        heads: Heads of all that stands for them.
    """
    convs: int
    heads: int
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int


class PadSame(nn.Module):
    """Pad as TensorFlow does, by what the input's size leaves over: what timm's Conv2dSame does before it convolves."""

    def __init__(self, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]):
        super().__init__()
        self.kernel_size, self.stride, self.dilation = list(kernel_size), list(stride), list(dilation)

    def extra_repr(self) -> str:
        return f'kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pad_same(x, self.kernel_size, self.stride, self.dilation)


def to_attention(conv: Any, alpha: float) -> nn.Module:
    """Like :func:`conv_to_attention`, for timm's Conv2dSame too, of which it makes a plain Conv2d."""
    pads = type(conv) is Conv2dSame
    if not pads:
        return conv_to_attention(conv, alpha)
    pad = PadSame(conv.kernel_size, conv.stride, conv.dilation)
    conv.__class__ = nn.Conv2d
    return nn.Sequential(pad, conv_to_attention(conv, alpha)).train(conv.training)


def count_flops(model: nn.Module, input_size: Sequence[int]) -> Tuple[int, List[str]]:
    """FLOPs of a net, see :class:`ConversionReport`, and names of the modules that convolve in it.

    Of these the innermost only, and of the net's class if it convolves itself.
    """
    model = copy.deepcopy(model).eval()
    first = next(model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *input_size, device=first.device, dtype=first.dtype))
    flops = counter.get_flop_counts()
    names = [name for name in flops if name != 'Global' and torch.ops.aten.convolution in flops[name]]
    inner = [n for n in names if not any(m.startswith(n + '.') for m in names)]
    return counter.get_total_flops(), [n.partition('.')[2] or n for n in inner]


def convs_to_attention(
        model: nn.Module,
        alpha: float = 46.,
        input_size: Optional[Sequence[int]] = None,
) -> Tuple[nn.Module, ConversionReport]:
    """Replace every convolution of a net by the attention that it is; see :func:`conv_to_attention`.

    Args:
        model: A net that convolves by modules: nn.Conv1d, Conv2d, Conv3d and timm's Conv2dSame. It is left as it is.
        alpha: Inverse width of the heads' Gaussians.
        input_size: Size of one input, e.g. channels, height and width, to count FLOPs for; by default the one that the
            net's timm configuration names, or 3 x 224 x 224.

    Returns:
        A copy of the net, the same in all but its convolutions, and what it costs.

    Raises:
        ValueError: If the net has no convolutions, or some that are not to be replaced: transposed, with a forward of
            their own (weight standardisation), with weights that other modules use too, or by a function.
    """
    if input_size is None:
        input_size = get_model_input_config(model)['input_size']
    attention = copy.deepcopy(model)
    users = Counter(p for m in attention.modules() for p in m.parameters(recurse=False))
    replaced: Dict[nn.Module, nn.Module] = {}
    for name, conv in attention.named_modules():
        if isinstance(conv, _ConvNd):
            if any(users[p] > 1 for p in conv.parameters()):
                raise ValueError(f'model: convolution {name!r} shares parameters with another module, needs its own')
            try:
                replaced[conv] = to_attention(conv, alpha)
            except ValueError as e:
                raise ValueError(f'model: convolution {name!r}: {e}') from e
    if not replaced:
        raise ValueError(f'model={type(model).__name__}: has no convolutions')
    for name, module in list(attention.named_modules(remove_duplicate=False)):
        if module in replaced and name:
            attention.set_submodule(name, replaced[module])
    attention = replaced.get(attention, attention)

    flops_before, _ = count_flops(model, input_size)
    flops_after, convolving = count_flops(attention, input_size)
    if convolving:
        raise ValueError(f'model: convolves by functions, not by modules to replace, in {", ".join(convolving)}')
    return attention, ConversionReport(
        convs=len(replaced),
        heads=sum(m.num_heads for m in attention.modules() if isinstance(m, ConvAttention)),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in attention.parameters()),
        flops_before=flops_before,
        flops_after=flops_after,
    )
