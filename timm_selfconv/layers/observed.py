"""Detects tracers, hooks and transforms that need ordinary operators, or to see them."""
import contextlib
from contextvars import ContextVar
from typing import Iterator

import torch
import torch.nn as nn

_operators_only = ContextVar('operators_only', default=False)


@contextlib.contextmanager
def operators_only() -> Iterator[None]:
    """Compute layers by their definition, in plain operators, inside this context (thread-local)."""
    token = _operators_only.set(True)
    try:
        yield
    finally:
        _operators_only.reset(token)


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
        _operators_only.get() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0 or isinstance(x, torch.fx.Proxy) or x.is_meta)


def counted() -> bool:
    """Detect counters that see every operator, as torch's of FLOPs, and fake tensors, which hold no numbers."""
    return torch._C._len_torch_dispatch_stack() > 0
