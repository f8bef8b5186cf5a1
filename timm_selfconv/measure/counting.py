"""Parameters and FLOPs of a net, every count by one named convention.

torch's FlopCounterMode sees what a net runs and counts its products of matrices, 2 FLOPs per multiply-add: Linear,
Conv2d, and those of attention (queries with keys and tables, probabilities with values, row and column factors with
values). Norms, softmax, activations, sums and pooling count nothing, nor does what is made element by element: scores
of the position term, once for all images (0.04 % of sa_learned_cifar), a quadratic encoding's products of offsets with
what queries give, and SAN's sums over a footprint with weights for each channel (0.8 % of san_patchwise_hier_cifar). An
operator that is neither counted nor known to be free is an error.
"""
import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Callable, Dict, List, Set, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from timm_selfconv.layers import explicit_maps

__all__ = ['FREE', 'Counts', 'Needs', 'count', 'device_needs']

# beside views and what acts on single elements: operators that make tensors, move, reduce, pool or normalise
FREE = frozenset((
    '_adaptive_avg_pool2d _local_scalar_dense _log_softmax _native_batch_norm_legit_no_training _safe_softmax _softmax '
    '_to_copy _unsafe_view all amax amin any arange argmax argmin as_strided_ avg_pool2d cat constant_pad_nd copy_ '
    'cumsum diag_embed empty empty_like eye fill_ full full_like gather hardswish_ index index_select linspace max '
    'max_pool2d_with_indices mean min native_batch_norm native_group_norm native_layer_norm new_empty new_full '
    'new_ones new_zeros ones ones_like reflection_pad2d repeat replication_pad2d roll scatter sort stack sum topk '
    'var_mean zero_ zeros zeros_like'
).split())


def onednn_linear_flops(x: List[int], weight: List[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of a linear map that a net sends through oneDNN, from shapes, as the counter's own rules."""
    return 2 * prod(out_shape) * weight[1]


def fused_attention_flops(
        query: List[int], key: List[int], value: List[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of fused attention on a CPU, likewise."""
    return sdpa_flop_count(query, key, value)


# rules beside the counter's own, which knows fused attention on a CPU from torch 2.15 on only
RULES: Dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_attention_flops}
if torch.backends.mkldnn.is_available():
    RULES[torch.ops.mkldnn._linear_pointwise] = onednn_linear_flops


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


class SeenOperators(TorchDispatchMode):
    """Collects the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def is_free(operator: Any) -> bool:
    """Whether an operator holds no product of matrices: a view, a function of single elements, or one of `FREE`."""
    return operator.is_view or torch.Tag.pointwise in operator.tags or operator.overloadpacket.__name__ in FREE


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
    """FLOPs of all products when a net sees images, and those of its linear functions and convolutions alone.

    Raises:
        NotImplementedError: If operators run that are neither counted nor known to be free.
    """
    counter = FlopCounterMode(display=False, custom_mapping=RULES)
    with torch.no_grad(), SeenOperators() as operators, counter, LinearConvFlops(counter) as linear_conv:
        model(images)
    counted = {*flop_registry, *RULES}
    unknown = {str(op) for op in operators.seen if op.overloadpacket not in counted and not is_free(op)}
    if unknown:
        raise NotImplementedError(f'no rule counts {sorted(unknown)}')
    return counter.get_total_flops(), linear_conv.flops


def attention_macs(inputs: List[Any], outputs: List[Any]) -> int:
    """softmax(q k') v for fvcore: each query meets each key once in q k' and once in the product with v."""
    key, out = get_shape(inputs[1]), get_shape(outputs[0])
    queries = prod(out[:-1])  # batch and heads included
    return queries * key[-2] * (key[-1] + out[-1])


def fvcore_macs(model: nn.Module, images: torch.Tensor) -> int:
    """What fvcore counts, its warnings off."""
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

    Raises:
        NotImplementedError: If an operator of the net is neither counted nor known to be free.
    """
    model = copy.deepcopy(model).eval()
    first = next(model.parameters())
    images = torch.zeros(1, *input_size, device=first.device, dtype=first.dtype)
    flops, _ = count_flops(model, images)
    with explicit_maps():
        dense_flops, linear_conv_flops = count_flops(model, images)  # here every Linear runs as such
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        linear_conv_flops=linear_conv_flops,
        fvcore_macs=fvcore_macs(model, images),
        dense_flops=dense_flops,
        flops=flops,
    )


@dataclass(frozen=True)
class Needs:
    """What a forward pass asks of a device, by its operators: figures of the model, not of a run.

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
    """What a net's forward pass in eval mode asks of a device, which need not be there.

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
        with FlopCounterMode(display=False, custom_mapping=RULES) as counter, Traffic() as traffic:
            model(images)
    return Needs(traffic.launches, traffic.bytes, counter.get_total_flops())
