"""Operators whose gradients are written by hand."""
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

__all__ = ['Kernel', 'flush_denormals']

# smaller probabilities are set to zero
TINY = 1e-30


def flush_denormals(probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Probabilities in a dtype, 0 for those too small to change a sum: products of denormal numbers are slow."""
    return F.threshold(probs.to(dtype), TINY, 0.)


def gradients_of_operators(
        operators: Callable[..., torch.Tensor],
        grad: torch.Tensor,
        needs: Sequence[bool],
        inputs: Sequence[Optional[torch.Tensor]],
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


class Kernel:
    """A function of tensors in groups, with gradients in groups: one operator to autograd and to compilers.

    It keeps its inputs only for the backward pass. Second derivatives and batches of gradients are those of its
    definition in plain operators. Functional transforms should be given that definition at once.
    """

    def __init__(
            self,
            name: str,
            forward: Callable[..., torch.Tensor],
            gradients: Callable[..., List[torch.Tensor]],
            operators: Callable[..., torch.Tensor],
            empty: Callable[..., torch.Tensor],
    ):
        """
        Args:
            name: The operator's, in torch's namespace of this project.
            forward: The function in groups, of annotated tensors.
            gradients: Gradients of the result's gradient, which inputs need one, and the inputs: a tensor for each
                input, any for those that need none.
            operators: The function in plain operators.
            empty: Makes the function's result without its numbers.
        """
        self.forward = forward
        self.operator = torch.library.custom_op(f'timm_selfconv::{name}', forward, mutates_args=())
        inputs = torch.library.infer_schema(forward, mutates_args=()).split(') ->')[0].removeprefix('(')
        differential = torch.library.custom_op(
            f'timm_selfconv::{name}_gradients', gradients, mutates_args=(),
            schema=f'(Tensor grad, bool[] needs, {inputs}) -> Tensor[]')

        def save(ctx: Any, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
            inputs = ctx.saved_tensors  # once: under checkpointing they are computed anew
            needs = ctx.needs_input_grad[:len(inputs)]
            if torch.is_grad_enabled() or mapped(grad):  # who differentiates once more needs a graph of this
                return gradients_of_operators(operators, grad, needs, inputs)
            found = differential(grad, list(needs), *inputs)
            return tuple(g if need else None for g, need in zip(found, needs))

        def batch(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return torch.vmap(operators, in_dims)(*inputs), 0

        def empty_gradients(grad: torch.Tensor, needs: Sequence[bool], *inputs: Any) -> List[torch.Tensor]:
            return [
                grad.new_empty(0) if not need else torch.empty_like(t, memory_format=torch.contiguous_format)
                for t, need in zip(inputs, needs)]

        self.operator.register_fake(empty)
        self.operator.register_autograd(backward, setup_context=save)
        self.operator.register_vmap(batch)
        differential.register_fake(empty_gradients)

    def __call__(self, *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        """The function of its inputs; outside of autograd and compilers every operator shows."""
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return self.operator(*inputs) if differentiated or torch.compiler.is_compiling() else self.forward(*inputs)
