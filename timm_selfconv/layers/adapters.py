"""Copies of nets with their adapters (LoRA) merged; other wrappers, parametrizations and hooks are refused.

Fusing, inclusion, pruning and merging read weights, and such layers compute more than their weights say.
"""
import copy
from typing import Any, Collection, List, Optional, TypeVar

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from .kernels.kernel import hooked

__all__ = ['ATTENTION', 'plain_copy']

# names of what an attention layer's weights are in, and of all linear layers
ATTENTION = ('encoding', 'query', 'key', 'value', 'proj')
LINEAR = (*ATTENTION[1:], 'fc1', 'fc2')
PROBES = 8

ModelT = TypeVar('ModelT', bound=nn.Module)


def is_adapter(module: nn.Module) -> bool:
    """Detects modules that wrap a layer and can merge themselves into it, as those of peft."""
    return callable(getattr(module, 'merge', None)) and callable(getattr(module, 'get_base_layer', None))


def check_plain(name: str, module: nn.Module) -> None:
    """Refuse a module that computes more than its weights say.

    Raises:
        ValueError: If it is hooked, parametrized, has a forward of its own, or replaces a linear layer.
    """
    replaced = name.rpartition('.')[2] in LINEAR and type(module) not in (nn.Linear, nn.Identity)
    if replaced or is_parametrized(module) or hooked(module) or 'forward' in vars(module):
        raise ValueError(
            f'{name or "model"}={type(module).__name__}: computes more than its weights say (it is wrapped, '
            'parametrized, pruned or hooked, and has no merge()); remove that first, or make it permanent')


def merged(name: str, adapter: Any) -> nn.Module:
    """Merge an adapter into the layer that it wraps, and return the layer.

    Raises:
        ValueError: If it can't be merged, or the layer computes something else then (adapters that are switched off).
    """
    base = adapter.get_base_layer()
    check_plain(name, base)
    if isinstance(base, nn.Linear):
        shape = [PROBES, base.in_features]
    elif isinstance(base, nn.Conv2d):
        shape = [PROBES, base.in_channels, *base.kernel_size]
    else:
        raise ValueError(f'{name}: adapts {type(base).__name__}, needs a Linear or Conv2d')
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(base.weight)
    with torch.no_grad():
        wanted = adapter.eval()(x)
        try:
            adapter.merge()
        except (RuntimeError, ValueError) as e:
            raise ValueError(f'{name}={type(adapter).__name__}: cannot be merged ({e})') from e
        error = (base(x) - wanted).abs().max()
    if not error <= torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max():
        raise ValueError(f'{name}={type(adapter).__name__}: computes something else once it is merged')
    return base


def plain_copy(model: ModelT, names: Optional[Collection[str]] = None) -> ModelT:
    """Copy a net with its adapters merged.

    Args:
        model: Any net; it is left as it is.
        names: Last parts of the names of the modules to look at; all by default.

    Returns:
        The copy. Among these modules there are no adapters, and none that is parametrized, hooked or otherwise wrapped.

    Raises:
        ValueError: If one can't be merged, or computes more than its weights say; it is named.
    """
    adapters: List[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f'{outer}.') for outer in adapters):
            continue
        if names is None or name.rpartition('.')[2] in names:
            if is_adapter(module):
                adapters.append(name)
            else:
                check_plain(name, module)
    plain = copy.deepcopy(model)
    for name in adapters:
        plain.set_submodule(name, merged(name, plain.get_submodule(name)))
    return plain
