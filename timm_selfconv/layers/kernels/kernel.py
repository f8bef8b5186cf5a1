"""Operators that walk through their inputs in groups, and who needs plain ones instead: tracers, hooks, transforms."""
import contextlib
import itertools
from contextvars import ContextVar
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_function

__all__ = [
    'CPU_BYTES', 'Kernel', 'TINY', 'at_least_float32', 'autocast_dtype', 'computed_by', 'counted', 'explicit_maps',
    'hooked', 'needs_plain_ops', 'switched',
]

# bytes that a group holds at most: on a CPU a share of the cache, elsewhere of the memory
CPU_BYTES = 8 * 2 ** 20
DEVICE_BYTES = 2 ** 30
# smaller probabilities are set to zero: they change no sum, and products of denormal numbers are slow
TINY = 1e-30

Tensors = Sequence[Optional[torch.Tensor]]
Axes = Tuple[Optional[int], Optional[int]]
Places = Tuple[slice, slice]


# '' by kernels, 'operators' without them, 'maps' with attention maps materialised
computed_by = ContextVar('computed_by', default='')


@contextlib.contextmanager
def switched(computed: str) -> Iterator[None]:
    """Compute layers as one of the names of `computed_by` says inside this context (thread-local)."""
    token = computed_by.set(computed)
    try:
        yield
    finally:
        computed_by.reset(token)


def explicit_maps() -> ContextManager[None]:
    """Materialise attention maps in SelfAttention2d layers inside this context (thread-local)."""
    return switched('maps')


def hooked(module: nn.Module) -> bool:
    """Detect hooks on a module's input, output or their gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def needs_plain_ops(x: torch.Tensor, compiled: bool = True) -> bool:
    """Detect tracers, exporters, functional transforms and compilers, which need ordinary operators.

    Ask this first: no condition may depend on what fx's stand-in for x has, its device or shape.

    Args:
        x: Input of the operators.
        compiled: Count compilers too, to which an operator of ours shows only its inputs and outputs.
    """
    if torch.compiler.is_compiling():
        # older torches export what they compile and don't say so
        return compiled or not hasattr(torch.compiler, 'is_exporting') or torch.compiler.is_exporting()
    return (
        computed_by.get() != '' or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0 or isinstance(x, torch.fx.Proxy) or x.is_meta)


def counted() -> bool:
    """Detect counters that see every operator, as torch's of FLOPs, and fake tensors, which hold no numbers."""
    return torch._C._len_torch_dispatch_stack() > 0


@torch.fx.wrap
@register_notrace_function
def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32, the rest as it is: offsets and their scores need more than 8 bits."""
    return x.float() if x.dtype == torch.float16 or x.dtype == torch.bfloat16 else x


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype that a linear map of x computes in: autocast's where that is on, but float64 stays."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


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


def part(t: Optional[torch.Tensor], axes: Axes, places: Sequence[slice]) -> Any:
    """A group's slice of a tensor, whole along axes that it lacks (None) or has a single place of."""
    for axis, place in zip(axes, places):
        if t is not None and axis is not None and t.shape[axis] > 1:
            t = t[(slice(None),) * axis + (place,)]
    return t


def groups(held: Sequence[int], inputs: Tensors, axes: Sequence[Axes]) -> List[Places]:
    """The images, and the heads or rows, of each group; see :class:`Kernel`."""
    images, parts, nbytes = held
    most = DEVICE_BYTES
    if any(t is not None and t.device.type == 'cpu' for t in inputs):
        # half of the most is quicker, unless inputs without images, which every group reads, are large
        shared = sum(t.nbytes for t, (of_images, _) in zip(inputs, axes) if t is not None and of_images is None)
        most = min(CPU_BYTES, max(CPU_BYTES // 2, 4 * shared))
    fit = max(1, most // max(1, nbytes))
    steps, places = (max(1, fit // parts), min(fit, parts)), []
    for i in range(0, max(1, images), steps[0]):
        for j in range(0, parts, steps[1]):
            places.append((slice(i, i + steps[0]), slice(j, j + steps[1])))
    return places


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
            gradients: Callable[..., Sequence[Optional[torch.Tensor]]],
            axes: Sequence[Axes],
            out_axes: Axes,
    ):
        """
        Args:
            name: The operator's, in torch's namespace of this project.
            operators: The definition, of annotated tensors.
            attend: The same for a group.
            gradients: For a group of the result's gradient, which inputs need one, and the inputs: a gradient of each
                input, None for those that need none.
            axes: Axes of each input that are images, and heads or rows. Shared ones (None) get a sum of gradients.
            out_axes: The same of the result; it is a sum of heads if it has none.
        """
        self.operators, self.attend, self.gradients = operators, attend, gradients
        self.axes, self.out_axes = axes, out_axes
        inputs = torch.library.infer_schema(operators, mutates_args=()).split(') ->')[0].removeprefix('(')
        self.operator = torch.library.custom_op(
            f'timm_selfconv::{name}', self.forward, mutates_args=(), schema=f'(SymInt[] held, {inputs}) -> Tensor')
        differential = torch.library.custom_op(
            f'timm_selfconv::{name}_gradients', self.backward, mutates_args=(),
            schema=f'(SymInt[] held, Tensor grad, bool[] needs, {inputs}) -> Tensor[]')

        def save(ctx: Any, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.held = inputs[0]
            ctx.save_for_backward(*inputs[1:])

        def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
            inputs = ctx.saved_tensors  # once: under checkpointing they are computed anew
            needs = ctx.needs_input_grad[1:]
            if torch.is_grad_enabled() or mapped(grad):  # who differentiates once more needs a graph of this
                return None, *gradients_of_operators(operators, grad, needs, inputs)
            found = differential(ctx.held, grad, list(needs), *inputs)
            return None, *(g if need else None for g, need in zip(found, needs))

        def batch(info: Any, in_dims: Any, held: Any, *inputs: Any) -> Any:
            return torch.vmap(operators, in_dims[1:])(*inputs), 0

        def empty(held: Any, *inputs: Any) -> torch.Tensor:
            return torch.empty_like(operators(*inputs), memory_format=torch.contiguous_format)

        def empty_gradients(held: Any, grad: torch.Tensor, needs: Sequence[bool], *inputs: Any) -> List[torch.Tensor]:
            return [
                grad.new_empty(0) if not need else torch.empty_like(t, memory_format=torch.contiguous_format)
                for t, need in zip(inputs, needs)]

        self.operator.register_fake(empty)
        self.operator.register_autograd(backward, setup_context=save)
        self.operator.register_vmap(batch)
        differential.register_fake(empty_gradients)

    def forward(self, held: Sequence[int], *inputs: Any) -> torch.Tensor:
        """The function group by group, out of autograd's sight."""
        out: Optional[torch.Tensor] = None
        for places in groups(held, inputs, self.axes):
            some = self.attend(*map(part, inputs, self.axes, itertools.repeat(places)))
            if out is None:
                shape = list(some.shape)
                for axis, size in zip(self.out_axes, held):
                    if axis is not None:
                        shape[axis] = size
                out = some.new_empty(shape)
            whole = part(out, self.out_axes, places)
            whole.add_(some) if self.out_axes[1] is None and places[1].start > 0 else whole.copy_(some)
        assert out is not None
        return out

    def backward(
            self,
            held: Sequence[int],
            grad: torch.Tensor,
            needs: Sequence[bool],
            *inputs: Optional[torch.Tensor],
    ) -> List[torch.Tensor]:
        """Gradients group by group, nothing where not needed; sums over groups are kept in float32 at least."""
        each = groups(held, inputs, self.axes)
        sums = torch.promote_types(grad.dtype, torch.float32)
        totals: List[torch.Tensor] = []
        written: List[bool] = []  # by each group a part of its own, not a sum over groups
        for t, axes, need in zip(inputs, self.axes, needs):
            written.append(t is not None and all(
                place.stop >= size or (axis is not None and t.shape[axis] > 1)
                for axis, size, place in zip(axes, held, each[0])))
            if t is None or not need:
                totals.append(grad.new_empty(0))
            elif written[-1]:
                totals.append(torch.empty_like(t, memory_format=torch.contiguous_format))
            else:
                totals.append(torch.zeros(t.shape, dtype=sums, device=t.device))
        for places in each:
            some = map(part, inputs, self.axes, itertools.repeat(places))
            found = self.gradients(part(grad, self.out_axes, places), needs, *some)
            for total, axes, own, g in zip(totals, self.axes, written, found):
                if g is not None:
                    whole = part(total, axes, places)
                    whole.copy_(g) if own else whole.add_(g)
        return [total if t is None else total.to(t.dtype) for total, t in zip(totals, inputs)]

    def __call__(self, held: Tuple[int, int, int], *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        """The function of its inputs; outside of autograd and compilers every operator shows.

        Args:
            held: How many images there are, how many heads or rows, and bytes that one of one holds.
            inputs: Inputs of the operators.
        """
        if not held[0]:  # no image has no shape to infer
            return self.operators(*inputs)
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if differentiated or torch.compiler.is_compiling():
            return self.operator(held, *inputs)
        return self.forward(held, *inputs)
