"""Operators that process their inputs in groups; detection of tracers, hooks and transforms, which need plain ones."""
import contextlib
import functools
from contextvars import ContextVar
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn

__all__ = [
    'CPU_BYTES', 'Kernel', 'TINY', 'at_least_float32', 'computed_by', 'explicit_maps', 'gradients_of_operators',
    'hooked', 'kernel_dtype', 'mapped', 'needs_plain_ops', 'switched', 'switches',
]

# bytes that a group holds at most: on a CPU a share of the cache, elsewhere of the memory
CPU_BYTES = 8 * 2 ** 20
DEVICE_BYTES = 2 ** 30
# smaller probabilities are set to zero: they change no sum, and products of denormal numbers are slow
TINY = 1e-30

Tensors = Sequence[Optional[torch.Tensor]]
Axes = Tuple[Optional[int], Optional[int]]


# '' by kernels, 'operators' without them, 'maps' with attention maps materialised
computed_by = ContextVar('computed_by', default='')
# all that are set, in any thread: asked first where nets are compiled, as older torches break a graph at a ContextVar
switches: List[str] = []


@contextlib.contextmanager
def switched(computed: str) -> Iterator[None]:
    """Compute layers as one of the names of `computed_by` says inside this context (thread-local)."""
    token = computed_by.set(computed)
    switches.append(computed)
    try:
        yield
    finally:
        switches.remove(computed)
        computed_by.reset(token)


def explicit_maps() -> ContextManager[None]:
    """Materialise attention maps in SelfAttention2d layers inside this context (thread-local)."""
    return switched('maps')


def hooked(module: nn.Module) -> bool:
    """Detect hooks on a module's input, output or their gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def kernel_dtype(x: torch.Tensor) -> Optional[torch.dtype]:
    """The dtype that kernels compute in for an input x: autocast's where that is on, but float64 stays.

    Ask this first: no condition may depend on what fx's stand-in for x has, its device or shape.

    Returns:
        The dtype, or None where ordinary operators are needed: by tracers, exporters and functional transforms. To
        compilers an operator of ours shows its inputs and outputs only.
    """
    compiling = torch.compiler.is_compiling()  # when older torches can't ask whether a device has autocast
    if compiling:
        # older torches export what they compile and don't say so
        if not hasattr(torch.compiler, 'is_exporting') or torch.compiler.is_exporting():
            return None
    elif (computed_by.get() != '' or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0 or isinstance(x, torch.fx.Proxy) or x.is_meta):
        return None
    device = x.device.type
    if x.dtype != torch.float64 and (compiling or torch.amp.is_autocast_available(device)) \
            and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def needs_plain_ops(x: torch.Tensor) -> bool:
    """Detect what needs ordinary operators, see :func:`kernel_dtype`, and compilers, which make better ones of them."""
    return torch.compiler.is_compiling() or kernel_dtype(x) is None


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32, the rest as it is: offsets and their scores need more than 8 bits."""
    return x.float() if x.dtype == torch.float16 or x.dtype == torch.bfloat16 else x


def gradients_of_operators(
        operators: Callable[..., torch.Tensor],
        grad: torch.Tensor,
        needs: Sequence[bool],
        inputs: Tensors,
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients of a function of tensors by autograd, where needed: to be differentiated or mapped once more."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [None if t is None else t.view_as(t) for t in inputs]  # of which none comes from another
        wanted = [t for t, need in zip(inputs, needs) if need and t is not None]
        found = iter(torch.autograd.grad(operators(*inputs), wanted, grad, create_graph=create_graph))
    return tuple(next(found) if need else None for need in needs)


def mapped(grad: torch.Tensor) -> bool:
    """Return True for batched gradients, of torch.vmap or of `is_grads_batched`."""
    functorch: Any = torch._C._functorch
    return not torch.compiler.is_compiling() and (
        functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad))


def in_groups(
        function: Callable[..., Any],
        nbytes: int,
        tensors: Sequence[Any],
        axes: Sequence[Axes],
        results: Sequence[Optional[Tuple[Sequence[int], torch.dtype]]],
        result_axes: Sequence[Axes],
        sums: torch.dtype,
) -> List[Any]:
    """What a function makes of tensors, computed for some images, and some heads or rows of them, at a time.

    Args:
        function: Makes of a group's part of the tensors a result, or a tuple of them, None for those not wanted.
        nbytes: Bytes that it holds for one head or row of one image.
        tensors: What it takes; the first one has all images.
        axes: Axes of each tensor that are images, and heads or rows. Where it lacks them (None), or has a single place,
            all groups see the whole of it.
        results: Shape and dtype of each result, None for those not wanted.
        result_axes: Axes of each result. Where it lacks them it is a sum over groups.
        sums: What such sums are kept in, at least.
    """
    parts, shared, most = 1, 0, DEVICE_BYTES
    for t, (of_images, of_parts) in zip(tensors, axes):
        if t is not None:
            parts = max(parts, 1 if of_parts is None else t.shape[of_parts])
            shared += t.nbytes if of_images is None else 0
    if tensors[0].device.type == 'cpu':  # half of the most is quicker, unless what every group reads is large
        most = min(CPU_BYTES, max(CPU_BYTES // 2, 4 * shared))
    fit = max(1, most // max(1, nbytes))
    sizes, steps = (len(tensors[0]), parts), (max(1, fit // parts), min(fit, parts))

    totals: List[Any] = []
    summed: List[bool] = []
    for result, own in zip(results, result_axes):
        summed.append(not sizes[0])  # of no images all sums are 0
        total = None
        if result is not None:
            shape, dtype = result
            for axis, size, step in zip(own, sizes, steps):
                if step < size and (axis is None or shape[axis] == 1):
                    dtype, summed[-1] = torch.promote_types(dtype, sums), True
            total = (torch.zeros if summed[-1] else torch.empty)(shape, dtype=dtype, device=tensors[0].device)
        totals.append(total)
    for i in range(0, sizes[0], steps[0]):
        for j in range(0, sizes[1], steps[1]):
            views = []
            for t, own in zip((*tensors, *totals), (*axes, *result_axes)):
                for axis, start, step in zip(own, (i, j), steps):
                    if t is not None and axis is not None and t.shape[axis] > step:
                        t = t.narrow(axis, start, min(step, t.shape[axis] - start))
                views.append(t)
            found = function(*views[:len(tensors)])
            found = found if isinstance(found, tuple) else (found,)
            for total, adds, g in zip(views[len(tensors):], summed, found):
                if g is not None:
                    total.add_(g) if adds else total.copy_(g)
    for k, result in enumerate(results):
        if result is not None:
            totals[k] = totals[k].to(result[1])
    return totals


class Kernel:
    """A function of tensors in groups, with gradients in groups: one operator to autograd and to compilers.

    A group is some images and some heads, or some rows of queries, of them. It keeps its inputs only for the backward
    pass. Second derivatives and batches of gradients go by the definition in plain operators, which functional
    transforms should be given.
    """

    def __init__(
            self,
            name: str,
            operators: Callable[..., torch.Tensor],
            attend: Callable[..., torch.Tensor],
            gradients: Callable[..., Tuple[Optional[torch.Tensor], ...]],
            axes: Sequence[Axes],
            out_axes: Axes,
    ):
        """
        Args:
            name: The operator's, in torch's namespace of this project.
            operators: The definition, of annotated tensors. The first one has all images, and the result its dtype.
            attend: The same for a group.
            gradients: For a group, of which inputs need one, the result's gradient, and the inputs: a gradient of each
                input, None for those that need none.
            axes: Axes of each input that are images, and heads or rows; see :func:`in_groups`.
            out_axes: The same of the result.
        """
        self.attend, self.axes, self.out_axes = attend, axes, out_axes
        inputs = torch.library.infer_schema(operators, mutates_args=()).split(') ->')[0].removeprefix('(')

        def differentiate(nbytes: int, grad: torch.Tensor, needs: Sequence[bool], *inputs: Any) -> List[torch.Tensor]:
            wanted = [(t.shape, t.dtype) if need else None for t, need in zip(inputs, needs)]
            found = in_groups(
                functools.partial(gradients, needs), nbytes, (grad, *inputs), (out_axes, *axes), wanted, axes,
                sums=torch.promote_types(grad.dtype, torch.float32))
            return [grad.new_empty(0) if g is None else g for g in found]

        def save(ctx: Any, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.nbytes = inputs[1]
            ctx.save_for_backward(*inputs[2:])

        def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
            inputs = ctx.saved_tensors  # once: under checkpointing they are computed anew
            needs = ctx.needs_input_grad[2:]
            if torch.is_grad_enabled() or mapped(grad):  # second derivatives need a graph of this
                return None, None, *gradients_of_operators(operators, grad, needs, inputs)
            found = differential(ctx.nbytes, grad, list(needs), *inputs)
            return None, None, *(g if need else None for g, need in zip(found, needs))

        def batch(info: Any, in_dims: Any, shape: Any, nbytes: Any, *inputs: Any) -> Any:
            return torch.vmap(operators, in_dims[2:])(*inputs), 0

        def empty(shape: Sequence[int], nbytes: int, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0].new_empty(shape)

        def empty_gradients(nbytes: int, grad: torch.Tensor, needs: Sequence[bool], *inputs: Any) -> List[torch.Tensor]:
            return [t.new_empty(t.shape) if need else grad.new_empty(0) for t, need in zip(inputs, needs)]

        # called by the operator, out of autograd's sight, it computes
        self.operator = torch.library.custom_op(
            f'timm_selfconv::{name}', self.__call__, mutates_args=(),
            schema=f'(SymInt[] shape, SymInt nbytes, {inputs}) -> Tensor')
        self.operator.register_fake(empty)
        self.operator.register_autograd(backward, setup_context=save)
        self.operator.register_vmap(batch)
        differential = torch.library.custom_op(
            f'timm_selfconv::{name}_gradients', differentiate, mutates_args=(),
            schema=f'(SymInt nbytes, Tensor grad, bool[] needs, {inputs}) -> Tensor[]')
        differential.register_fake(empty_gradients)

    def __call__(self, shape: Sequence[int], nbytes: int, *inputs: Any) -> torch.Tensor:
        """The function of its inputs; outside of autograd and compilers every operator shows.

        Args:
            shape: The result's.
            nbytes: Bytes that the function holds for one head or row of one image.
            inputs: Inputs of the operators.
        """
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if differentiated or torch.compiler.is_compiling():
            return self.operator(shape, nbytes, *inputs)
        dtype = inputs[0].dtype
        return in_groups(self.attend, nbytes, inputs, self.axes, [(shape, dtype)], [self.out_axes], sums=dtype)[0]
