"""From convolutional nets to attention: Theorem 1 for convolutions of a net, all or chosen ones, and what it costs."""
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
from .conv_to_attention import conv_to_attention

__all__ = ['ConversionReport', 'convs_to_attention']

Where = Union[str, Sequence[str], Callable[[str, nn.Module], bool], None]


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


def matcher(where: Where) -> Callable[[str, nn.Module], bool]:
    """Decide by name and module what is chosen; see :func:`convs_to_attention`."""
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else ['*'] if where is None else list(where)
    return lambda name, module: any(fnmatchcase(name, p) or fnmatchcase(name, f'{p}.*') for p in patterns)


def measure(model: nn.Module, input_size: Sequence[int]) -> Tuple[int, List[str], torch.Tensor]:
    """FLOPs of a net, see :class:`ConversionReport`, names of the modules that convolve in it, and its output.

    Of these the innermost only, and of the net's class if it convolves itself. All tensors of the output in one row, in
    float64 on the CPU.
    """
    model = copy.deepcopy(model).eval()
    x = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(x.to(next(model.parameters())))
    flops = counter.get_flop_counts()
    names = [name for name in flops if name != 'Global' and torch.ops.aten.convolution in flops[name]]
    inner = [n for n in names if not any(m.startswith(n + '.') for m in names)]
    row = torch.cat([t.flatten().cpu().double() for t in tree_leaves(out)])
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
        ValueError: If no convolution is chosen, or some are that can't be replaced: transposed, with a forward of their
            own (weight standardisation), with weights that other modules use too, or by a function.
    """
    if input_size is None:
        input_size = get_model_input_config(model)['input_size']
    attention, chosen = copy.deepcopy(model), matcher(where)
    users = Counter(p for m in attention.modules() for p in m.parameters(recurse=False))
    replaced: Dict[nn.Module, nn.Module] = {}
    kept = []
    for name, conv in attention.named_modules():
        if isinstance(conv, _ConvNd):
            if not chosen(name, conv):
                kept.append(name or type(conv).__name__)
                continue
            if any(users[p] > 1 for p in conv.parameters()):
                raise ValueError(f'model: convolution {name!r} shares parameters with another module, needs its own')
            try:
                replaced[conv] = to_attention(conv, alpha, content)
            except ValueError as e:
                raise ValueError(f'model: convolution {name!r}: {e}') from e
    if not replaced:
        raise ValueError(f'model={type(model).__name__}: has no convolutions' + (
            f' in where={where!r}, but in {", ".join(kept)}' if kept else ''))
    for name, module in list(attention.named_modules(remove_duplicate=False)):
        if module in replaced and name:
            attention.set_submodule(name, replaced[module])
    attention = replaced.get(attention, attention)

    flops_before, _, expected = measure(model, input_size)
    flops_after, convolving, out = measure(attention, input_size)
    modules = dict(attention.named_modules())
    functions = [n for n in convolving if n not in kept and (where is None or chosen(n, modules.get(n, attention)))]
    if functions:
        raise ValueError(f'model: convolves by functions, not by modules to replace, in {", ".join(functions)}')
    return attention, ConversionReport(
        convs=len(replaced),
        heads=sum(m.num_heads for m in attention.modules() if isinstance(m, ConvAttention)),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in attention.parameters()),
        flops_before=flops_before,
        flops_after=flops_after,
        error=float((out - expected).norm() / expected.norm()),
    )
