"""Checks of arguments and weights, and selection of heads."""
import functools
from typing import Any, Collection, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from .hooks import hooked

__all__ = [
    'ABSOLUTE', 'ATTENTION', 'ENCODINGS', 'RELATIVE', 'TERMS', 'check_dense', 'check_sizes', 'check_terms',
    'keep_from_decay', 'no_weight_decay', 'select_parameter']

TERMS = ('content', 'content_position', 'key_bias', 'position')
RELATIVE = ('quadratic', 'quadratic_gen', 'learned')
ABSOLUTE = ('sinusoid', 'absolute')
ENCODINGS = (*RELATIVE, *ABSOLUTE)
ATTENTION = ('encoding', 'query', 'key', 'value', 'proj')  # modules with the weights of an attention layer
LINEAR = (*ATTENTION[1:], 'fc1', 'fc2')


def check_sizes(**sizes: Any) -> None:
    """Raise a ValueError for the first argument that is not a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r}: needs an integer of at least 1')


def check_terms(terms: Sequence[str], encoding: str) -> Tuple[str, ...]:
    """Return the terms as a tuple, or raise a ValueError if the encoding does not support them."""
    terms = (terms,) if isinstance(terms, str) else tuple(terms)
    if encoding not in ENCODINGS:
        raise ValueError(f'encoding={encoding!r}: needs one of {ENCODINGS}')
    if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(TERMS):
        raise ValueError(f'terms={terms!r}: needs one or more of {TERMS}, each once')
    if encoding in ABSOLUTE and terms != ('content',):
        raise ValueError(f"terms={terms!r}: encoding={encoding!r} is absolute and needs terms=('content',)")
    return terms


def check_dense(model: nn.Module, names: Optional[Collection[str]] = None, prefix: str = '') -> None:
    """Check that modules have no wrappers or hooks, before their weights are merged or copied.

    Args:
        model: Any net or layer.
        names: Attribute names of the modules to check; default: all.
        prefix: Name of the model, for the error message.

    Raises:
        ValueError: If a module is wrapped (by an adapter), parametrized, quantised or hooked.
    """
    for name, module in model.named_modules(prefix=prefix):
        last = name.rpartition('.')[2]
        if names is not None and last not in names:
            continue
        replaced = last in LINEAR and type(module) not in (nn.Linear, nn.Identity)
        weight = getattr(module, 'weight', None)
        converted = isinstance(module, nn.Linear) and (type(weight) is not nn.Parameter or weight.is_sparse)
        if replaced or converted or is_parametrized(module) or hooked(module) or 'forward' in vars(module):
            raise ValueError(
                f'{name or "model"}={type(module).__name__}: needs a plain module, without adapters, parametrizations, '
                'quantised weights or hooks; merge adapters first (peft: merge_and_unload())')


def no_weight_decay(model: nn.Module) -> Set[str]:
    """Return the names of the centres and spreads of all attention layers.

    Weight decay must skip them, because it would pull heads towards the query. timm calls the method of this name.
    """
    return {name for name, _ in model.named_parameters() if name.rpartition('.')[2] in ('centers', 'spreads')}


def keep_from_decay(model: nn.Module, names: Set[str]) -> None:
    """Add names to the ``no_weight_decay`` of a model, which timm's optimizers read."""
    net: Any = model  # nn.Module has no such method
    net.no_weight_decay = functools.partial(set, getattr(model, 'no_weight_decay', set)() | names)


def select_parameter(module: nn.Module, name: str, index: torch.Tensor, dim: int = 0) -> None:
    """Replace a parameter of a module by its slices with these indices, shape (n,). None stays None."""
    parameter = getattr(module, name)
    if parameter is not None:
        slices = parameter.detach().index_select(dim, index.to(parameter.device))
        setattr(module, name, nn.Parameter(slices, parameter.requires_grad))
