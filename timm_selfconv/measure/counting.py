"""Parameters and FLOPs of a net, every count by one named convention.

torch's FlopCounterMode counts the products of matrices that a net runs on the meta device, 2 FLOPs per multiply-add:
Linear, Conv2d, and the products of attention (queries with keys and tables, probabilities with values, row and column
factors with values). It counts no norms, softmax, activations, sums and pooling, and no products element by element:
scores of the position term, once for all images (0.04 % of sa_learned_cifar), a quadratic encoding's products of
offsets with coefficients, and SAN's weighted sums over a footprint (0.8 % of san_patchwise_hier_cifar).
"""
import copy
from dataclasses import dataclass
from math import prod
from typing import Any, List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ['Counts', 'count']


@dataclass(frozen=True)
class Counts:
    """Counts of one net for one image.

    Attributes:
        parameters: Numbers in all parameters, frozen ones included.
        linear_conv_flops: 2 x multiply-adds of Linear and Conv2d: the papers' convention.
        fvcore_macs: fvcore's count for the path that runs, given a handle for fused attention, which it lacks:
            multiply-adds (it says flops), with norms and adaptive pooling, and to four digits an einsum.
        dense_flops: 2 x all multiply-adds, attention through explicit maps.
        flops: 2 x all multiply-adds, attention on the path that runs.
    """
    parameters: int
    linear_conv_flops: int
    fvcore_macs: int
    dense_flops: int
    flops: int


class LinearConvFlops(TorchFunctionMode):
    """Counts what a FlopCounterMode counts inside of linear functions and convolutions."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter = counter
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        before = self.counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv2d):
            self.flops += self.counter.get_total_flops() - before
        return result


def count_flops(model: nn.Module, images: torch.Tensor) -> Tuple[int, int]:
    """FLOPs of all products when a net sees images, and of those of its linear functions and convolutions."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, LinearConvFlops(counter) as linear_conv:
        model(images)
    return counter.get_total_flops(), linear_conv.flops


def attention_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """softmax(q k') v for fvcore: a product per query and key in q k', and one with v."""
    key, out = get_shape(inputs[1]), get_shape(outputs[0])
    queries = prod(out[:-1])  # batch and heads included
    return queries * key[-2] * (key[-1] + out[-1])


def fvcore_macs(model: nn.Module, images: torch.Tensor) -> int:
    """Count by fvcore, its warnings off."""
    analysis = FlopCountAnalysis(model, images).set_op_handle('aten::scaled_dot_product_attention', attention_macs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings('none')
    with torch.no_grad():
        return int(analysis.total())


def count(model: nn.Module, input_size: Tuple[int, int, int] = (3, 32, 32)) -> Counts:
    """Count a net's parameters and FLOPs for one image, in eval mode.

    Args:
        model: Any net; it is copied and left as it is.
        input_size: Channels, height and width of the image.
    """
    net: Any = copy.deepcopy(model).eval()
    first = next(net.parameters())
    images = torch.zeros(1, *input_size, device=first.device, dtype=first.dtype)
    macs = fvcore_macs(net, images)
    net, images = net.to('meta'), images.to('meta')
    flops, linear_conv_flops = count_flops(net, images)
    module: Any
    for module in net.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = False
    dense_flops, _ = count_flops(net, images)
    return Counts(
        parameters=sum(p.numel() for p in net.parameters()),
        linear_conv_flops=linear_conv_flops,
        fvcore_macs=macs,
        dense_flops=dense_flops,
        flops=flops,
    )
