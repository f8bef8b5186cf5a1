"""Parameters and FLOPs of a net.

FlopCounterMode of torch counts matrix products on the meta device, 2 FLOPs per multiply-add: Linear, Conv2d and the
products of attention. It does not count norms, softmax, activations, sums, pooling and element-wise products, such as
the weighted sums of SAN over a footprint (0.8 % of san_patchwise_hier_cifar).
"""
import copy
from dataclasses import dataclass
from math import prod
from typing import Any, List, Tuple

import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch.utils.flop_counter import FlopCounterMode

__all__ = ['Counts', 'count']


@dataclass(frozen=True)
class Counts:
    """Counts of one net for one image.

    Attributes:
        parameters: Number of parameters, with frozen ones.
        linear_conv_flops: 2 x multiply-adds of Linear and Conv2d, as the papers count.
        fvcore_macs: Multiply-adds by fvcore, with norms and adaptive pooling; fvcore rounds an einsum to four digits,
            and counts one product if one matrix multiplies many.
        dense_flops: 2 x all multiply-adds, with explicit attention maps.
        flops: 2 x all multiply-adds of the default path.
    """
    parameters: int
    linear_conv_flops: int
    fvcore_macs: int
    dense_flops: int
    flops: int


def count_flops(model: nn.Module, images: torch.Tensor) -> Tuple[int, int]:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    counts, net = counter.get_flop_counts(), type(model).__name__
    linear_conv = [f'{net}.{name}' for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return counter.get_total_flops(), sum(sum(counts[name].values()) for name in linear_conv if name in counts)


def attention_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """Multiply-adds of softmax(q k') v, which fvcore does not know."""
    key, out = get_shape(inputs[1]), get_shape(outputs[0])
    queries = prod(out[:-1])  # batch and heads included
    return queries * key[-2] * (key[-1] + out[-1])


def fvcore_macs(model: nn.Module, images: torch.Tensor) -> int:
    analysis = FlopCountAnalysis(model, images).set_op_handle('aten::scaled_dot_product_attention', attention_macs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings('none')
    with torch.no_grad():
        return int(analysis.total())


def count(model: nn.Module, input_size: Tuple[int, int, int] = (3, 32, 32)) -> Counts:
    """Count a net's parameters and FLOPs for one image, in eval mode.

    Args:
        model: Any net. It does not change.
        input_size: Channels, height and width of the image.
    """
    net: Any = copy.deepcopy(model).eval()
    images = next(net.parameters()).new_zeros(1, *input_size)
    macs = fvcore_macs(net, images)
    net, images = net.to('meta'), images.to('meta')
    flops, linear_conv_flops = count_flops(net, images)
    for module in net.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = False
    dense_flops, _ = count_flops(net, images)
    parameters = sum(p.numel() for p in net.parameters())
    return Counts(parameters, linear_conv_flops, macs, dense_flops, flops)
