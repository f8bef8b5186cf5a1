"""The MLP of a transformer layer, which keeps less for the backward pass."""
from typing import Any

import torch
import torch.nn as nn
import timm.layers
from torch.utils.checkpoint import checkpoint

from .linear import Linear
from .onlookers import hooked, must_be_plain

__all__ = ['Mlp']


class Mlp(timm.layers.Mlp):
    """timm's MLP, whose backward pass makes the activation again: elementwise, so no product is computed twice.

    Kept, it would be a sixth of all that a layer of position-only attention keeps in a training step.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for layer in (self.fc1, self.fc2):
            if type(layer) is nn.Linear:
                layer.__class__ = Linear

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """What hidden channels x, shape (..., hidden_features), give, shape (..., out_features)."""
        return self.fc2(self.norm(self.drop1(self.act(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From shape (..., in_features) to (..., out_features)."""
        x = self.fc1(x)
        if torch.jit.is_scripting():
            x = self.output(x)
        else:  # torchscript compiles what follows a return, but not an else
            # who hooks a module sees it called once
            plain = not torch.is_grad_enabled() or must_be_plain(x) or any(hooked(m) for m in self.children())
            x = self.output(x) if plain else checkpoint(self.output, x, use_reentrant=False)
        return self.drop2(x)
