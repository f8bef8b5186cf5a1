"""Who looks on while a net computes, so that it must go the plain way."""
import contextlib
from contextvars import ContextVar
from typing import Iterator

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

_operators_only = ContextVar('operators_only', default=False)


@contextlib.contextmanager
def operators_only() -> Iterator[None]:
    """Let layers compute by their definition meanwhile, in plain operators, in this thread (or task) only."""
    token = _operators_only.set(True)
    try:
        yield
    finally:
        _operators_only.reset(token)


def hooked(module: nn.Module) -> bool:
    """Whether somebody waits for a module's input, output or their gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def any_module_hooked() -> bool:
    """Whether somebody waits for every module's call, as torch's trackers of modules do."""
    return _has_any_global_hook()


def needs_operators(x: torch.Tensor) -> bool:
    """Whether somebody looks on whom no operator of ours may meet: a tracer, an exporter, a functional transform.

    Ask this first: no condition may hang on what fx's stand-in for x has, its device or shape.
    """
    if torch.compiler.is_compiling():
        # older torches export what they compile and don't say so
        return not hasattr(torch.compiler, 'is_exporting') or torch.compiler.is_exporting()
    return (
        _operators_only.get() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0 or isinstance(x, torch.fx.Proxy) or x.is_meta)


def must_be_plain(x: torch.Tensor) -> bool:
    """Whether somebody looks on to whom every operator must show: a tracer, a compiler, a functional transform."""
    return torch.compiler.is_compiling() or needs_operators(x)


def counted() -> bool:
    """Whether every operator is reported, as to torch's counter of FLOPs, or computes nothing, as of fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


def traced(x: torch.Tensor) -> bool:
    """Whether every operator on x must show, to autograd too."""
    return must_be_plain(x) or (torch.is_grad_enabled() and x.requires_grad)
