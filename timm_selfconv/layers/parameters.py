"""Checks of sizes, terms and encodings, and the selection of some heads' parameters."""
from typing import Any, Sequence, Tuple

import torch
import torch.nn as nn

__all__ = [
    'ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'TERMS', 'check_sizes', 'check_terms', 'head_channels', 'select_inputs',
    'select_parameter']

TERMS = ('content', 'content_position', 'key_bias', 'position')
RELATIVE = ('quadratic', 'quadratic_gen', 'learned')
ABSOLUTE = ('sinusoid', 'absolute')
ENCODINGS = (*RELATIVE, 'line', *ABSOLUTE)


def check_sizes(**sizes: Any) -> None:
    """Raise a ValueError for the first argument that is no integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r}: needs an integer of at least 1')


def check_terms(terms: Sequence[str], encoding: str) -> Tuple[str, ...]:
    """Check that terms and encoding exist and fit each other, and return the terms as a tuple.

    Raises:
        ValueError: If they do not.
    """
    terms = (terms,) if isinstance(terms, str) else tuple(terms)
    if encoding not in ENCODINGS:
        raise ValueError(f'encoding={encoding!r}: needs one of {ENCODINGS}')
    if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(TERMS):
        raise ValueError(f'terms={terms!r}: needs one or more of {TERMS}, each once')
    if encoding in ABSOLUTE and terms != ('content',):
        raise ValueError(f"terms={terms!r}: encoding={encoding!r} is absolute and needs terms=('content',)")
    if encoding == 'line' and ('position' not in terms or 'content_position' in terms):
        raise ValueError(f"terms={terms!r}: encoding='line' needs 'position' and has no 'content_position'")
    return terms


def select_parameter(module: nn.Module, name: str, index: torch.Tensor, dim: int = 0) -> None:
    """Replace a module's parameter by some of its slices; one that is left out (None) stays so.

    Args:
        module: Module that holds the parameter.
        name: Its name there.
        index: Which slices, in the order they shall have, shape (n,).
        dim: Axis of the slices.
    """
    parameter = getattr(module, name)
    if parameter is not None:
        slices = parameter.detach().index_select(dim, index.to(parameter.device))
        setattr(module, name, nn.Parameter(slices, parameter.requires_grad))


def head_channels(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers of the channels of these heads, shape (n,), that have so many each side by side: shape (n width,)."""
    return (heads[:, None] * width + torch.arange(width)).flatten()


def select_inputs(linear: nn.Linear, index: torch.Tensor) -> None:
    """Keep some input channels of a Linear, in this order."""
    select_parameter(linear, 'weight', index, dim=1)
    linear.in_features = len(index)
