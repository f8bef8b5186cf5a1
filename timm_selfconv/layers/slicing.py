"""Parameters of some heads only."""
import torch
import torch.nn as nn

__all__ = ['select_parameter']


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
