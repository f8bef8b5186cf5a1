"""Hooks of modules, and a look at layers and their inputs through hooks."""
import copy
import inspect
from typing import Any, Callable, List, TypeVar

import torch
import torch.nn as nn

__all__ = ['hooked', 'look_into', 'private_copy']

T = TypeVar('T')


def hooked(module: nn.Module) -> bool:
    """Detect hooks on the input, the output or the gradients of a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def private_copy(model: nn.Module) -> nn.Module:
    """Copy a net in eval mode that shares parameters and buffers with the original.

    Modes, flags and hooks are separate, so threads that run the original do not see changes to the copy.
    """
    hooks = (hook for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for hook in d.values())
    memo = {id(shared): shared for shared in (*model.parameters(), *model.buffers(), *hooks)}
    return copy.deepcopy(model, memo).eval()


def look_into(model: nn.Module, kinds: Any, images: torch.Tensor, look: Callable[..., T]) -> List[T]:
    """Apply a function to layers of some types and all their arguments, in a copy of the net, in forward order."""
    net = private_copy(model)
    seen: List[T] = []

    def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append(look(layer, *bound.args))

    for layer in net.modules():
        if isinstance(layer, kinds):
            layer.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        net(images)
    return seen
