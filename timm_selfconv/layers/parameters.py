"""Sizes of layers, and parameters of some heads only."""
from typing import Any

import torch
import torch.nn as nn

__all__ = ['check_sizes', 'select_parameter']


def check_sizes(**sizes: Any) -> None:
    """Raise a ValueError for the first argument that is no integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r}: needs an integer of at least 1')


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
