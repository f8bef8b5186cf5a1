"""Parameters and FLOPs of a net, every count by one named convention.

torch's FlopCounterMode counts the products of matrices that a net runs on the meta device, in plain operators, 2 FLOPs
per multiply-add: Linear, Conv2d, and those of attention (queries with keys and tables, probabilities with values, row
and column factors with values). Nothing else counts: norms, softmax, activations, sums, pooling, and what is made
element by element: scores of the position term, once for all images (0.04 % of sa_learned_cifar), a quadratic
encoding's products of offsets with what queries give, and SAN's sums over a footprint with weights for each channel
(0.8 % of san_patchwise_hier_cifar).
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers import explicit_maps

__all__ = ['Counts', 'Needs', 'count', 'device_needs']


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
    """Counts what a counter counts while linear functions and convolutions run, those of modules and others."""

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

    Returns:
        The counts.
    """
    model = copy.deepcopy(model).eval()
    first = next(model.parameters())
    images = torch.zeros(1, *input_size, device=first.device, dtype=first.dtype)
    macs = fvcore_macs(model, images)
    model, images = model.to('meta'), images.to('meta')
    flops, linear_conv_flops = count_flops(model, images)
    with explicit_maps():
        dense_flops, _ = count_flops(model, images)
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        linear_conv_flops=linear_conv_flops,
        fvcore_macs=macs,
        dense_flops=dense_flops,
        flops=flops,
    )


@dataclass(frozen=True)
class Needs:
    """Work of a forward pass for a device, by operators: figures of the model, not of a run.

    Attributes:
        launches: Operators that a device starts kernels for, at least one each.
        bytes: Size of all tensors that these read and write, as if no cache kept any.
        flops: 2 x multiply-adds of their products.
    """
    launches: int
    bytes: int
    flops: int

    def roofline(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Seconds that a device of such speeds takes at least, launches aside."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


class Traffic(TorchDispatchMode):
    """Counts operators that compute or move something, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != 'prim' and not func.is_view and not func.overloadpacket.__name__.startswith('empty'):
            self.launches += 1
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def device_needs(
        model: nn.Module,
        batch_size: int,
        input_size: Tuple[int, int, int] = (3, 32, 32),
        device: str = 'cuda',
) -> Needs:
    """Count the work of a net's forward pass in eval mode for a device, which need not be there.

    Args:
        model: Any net; it is copied and left as it is. Its dtype is that of the images.
        batch_size: Number of images.
        input_size: Channels, height and width of the images.
        device: A device by torch's name for it; its tensors are fake and hold nothing.
    """
    model, dtype = copy.deepcopy(model).eval().to('meta'), next(model.parameters()).dtype
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to_empty(device=device)
        images = torch.empty(batch_size, *input_size, device=device, dtype=dtype)
        with FlopCounterMode(display=False) as counter, Traffic() as traffic:
            model(images)
    return Needs(traffic.launches, traffic.bytes, counter.get_total_flops())
