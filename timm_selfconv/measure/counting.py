"""Parameters and FLOPs of a net, every count by one named convention.

A multiply-add is one multiplication and one addition of a product of matrices: Linear, Conv2d, and the products of
attention (queries with keys and tables, probabilities with values, row and column factors with values). Norms, softmax,
activations, dropout, sums and pooling are no products of matrices and count nothing. Every operator of a net's trace is
either in `HANDLES`, which count multiply-adds, or free: in `FREE` or in fvcore's own list of views, copies and
comparisons; any other is an error. What is made element by element counts nothing either: scores of the position term,
once for all images (0.04 % of sa_learned_cifar), a quadratic encoding's products of offsets with what queries give, and
SAN's sums over a footprint with weights for each channel (0.8 % of san_patchwise_hier_cifar).
"""
import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape

from timm_selfconv.look.attention_maps import explicit_maps

__all__ = ['Counts', 'FREE', 'HANDLES', 'count']


def linear_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """y = x W': each output element sums over the input features."""
    return prod(get_shape(outputs[0])) * get_shape(inputs[1])[1]


def conv_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """Each output element sums over the kernel and the input channels of its group; weight (out, in / groups, ...).

    A transposed convolution scatters where a convolution gathers: its weight is (in, out / groups, ...), and each input
    element meets the kernel and the output channels of its group.
    """
    transposed = inputs[6].toIValue()
    return prod(get_shape(inputs[0] if transposed else outputs[0])) * prod(get_shape(inputs[1])[1:])


def matmul_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """Each output element, batch dimensions broadcast, sums over the last dimension of the first factor."""
    return prod(get_shape(outputs[0])) * get_shape(inputs[0])[-1]


def addmm_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """A matrix product added to the first input."""
    return matmul_macs(inputs[1:3], outputs)


def einsum_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """Two factors: one multiply-add for each assignment of all the indices.

    Raises:
        ValueError: If there are not two factors, or the equation leaves indices to an ellipsis.
    """
    equation = inputs[0].toIValue().replace(' ', '')
    shapes = [get_shape(v) for v in inputs[1].node().inputs()]
    operands = equation.split('->')[0].split(',')
    if len(operands) != 2 or '.' in equation:
        raise ValueError(f'einsum {equation!r}: counted for two factors with named indices alone')
    sizes: Dict[str, int] = {}
    for operand, shape in zip(operands, shapes):
        for index, size in zip(operand, shape):
            sizes[index] = max(size, sizes.get(index, 1))  # size 1 is broadcast
    return prod(sizes.values())


def attention_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """softmax(q k') v: each query meets each key once in q k' and once in the product with v."""
    key, out = get_shape(inputs[1]), get_shape(outputs[0])
    queries = prod(out[:-1])  # batch and heads included
    return queries * key[-2] * (key[-1] + out[-1])


UNKNOWN_TO_FVCORE = {'aten::scaled_dot_product_attention': attention_macs}
HANDLES: Dict[str, Callable[[List[Any], List[Any]], int]] = {
    'aten::linear': linear_macs,
    'aten::_convolution': conv_macs,
    'aten::matmul': matmul_macs,
    'aten::mm': matmul_macs,
    'aten::bmm': matmul_macs,
    'aten::addmm': addmm_macs,
    'aten::baddbmm': addmm_macs,
    'aten::einsum': einsum_macs,
    **UNKNOWN_TO_FVCORE,
}
# sums, norms, functions of single elements: an operation or a few an element
FREE = frozenset('aten::' + name for name in (
    'adaptive_avg_pool2d add add_ addcmul avg_pool2d batch_norm cos diag_embed div gelu hardsigmoid hardswish_ '
    'layer_norm linspace max_pool2d mean meshgrid mul neg pad pow reciprocal rsub sigmoid silu_ sin softmax square sub '
    'sum unflatten'
).split())


@dataclass(frozen=True)
class Counts:
    """Counts of one net for one image.

    Attributes:
        parameters: Numbers in all parameters, frozen ones included.
        linear_conv_flops: 2 x multiply-adds of Linear and Conv2d: the papers' convention.
        fvcore_macs: What fvcore prints for the path that runs, given a handle for fused attention, which it doesn't
            know: multiply-adds (it says flops), with norms and adaptive pooling, and to four digits an einsum.
        dense_flops: 2 x all multiply-adds, attention through explicit maps.
        flops: 2 x all multiply-adds, attention on the path that runs.
    """
    parameters: int
    linear_conv_flops: int
    fvcore_macs: int
    dense_flops: int
    flops: int


def analyse(model: nn.Module, images: torch.Tensor) -> FlopCountAnalysis:
    """fvcore's analysis with its own handles, its warnings off."""
    analysis = FlopCountAnalysis(model, images)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings('none')
    return analysis


def macs_by_operator(model: nn.Module, images: torch.Tensor) -> Dict[str, int]:
    """Multiply-adds of each operator in a net's trace, by `HANDLES`.

    Raises:
        NotImplementedError: If the trace has operators that are neither counted nor known to be free.
    """
    analysis = analyse(model, images).clear_op_handles().set_op_handle(**HANDLES)
    macs = {name: int(n) for name, n in analysis.by_operator().items()}
    unknown = set(analysis.unsupported_ops()) - FREE
    if unknown:
        raise NotImplementedError(f'no handle counts {sorted(unknown)}')
    return macs


def count(model: nn.Module, input_size: Tuple[int, int, int] = (3, 32, 32)) -> Counts:
    """Count a net's parameters and FLOPs for one image, in eval mode.

    Args:
        model: Any net; it is copied and left as it is.
        input_size: Channels, height and width of the image.

    Returns:
        The counts.

    Raises:
        NotImplementedError: If an operator of the net is neither counted nor known to be free.
    """
    model = copy.deepcopy(model).eval()
    first = next(model.parameters())
    images = torch.zeros(1, *input_size, device=first.device, dtype=first.dtype)
    with torch.no_grad():
        macs = macs_by_operator(model, images)
        fvcore_macs = analyse(model, images).set_op_handle(**UNKNOWN_TO_FVCORE).total()
        with explicit_maps(model):
            dense_macs = macs_by_operator(model, images)
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        linear_conv_flops=2 * (macs.get('linear', 0) + macs.get('_convolution', 0)),
        fvcore_macs=int(fvcore_macs),
        dense_flops=2 * sum(dense_macs.values()),
        flops=2 * sum(macs.values()),
    )
