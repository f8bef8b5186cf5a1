"""The MLP of a transformer layer, which keeps less for the backward pass."""
import torch
import timm.layers
from torch.utils.checkpoint import checkpoint

from .linear import apply_linear
from .observed import hooked, needs_plain_ops

__all__ = ['Mlp']


class Mlp(timm.layers.Mlp):
    """timm's MLP, whose backward pass makes the activation again: elementwise, so no product is computed twice.

    Kept, it would be a sixth of all that a layer of position-only attention keeps in a training step.
    """

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden channels x, shape (..., hidden_features), to outputs, shape (..., out_features)."""
        x = self.norm(self.drop1(self.act(x)))
        if torch.jit.is_scripting():
            return self.fc2(x)
        else:  # torchscript compiles what follows a return, but not an else
            return apply_linear(self.fc2, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From shape (..., in_features) to (..., out_features)."""
        if torch.jit.is_scripting():
            x = self.output(self.fc1(x))
        else:
            x = apply_linear(self.fc1, x)
            # who hooks a module sees it called once
            plain = not torch.is_grad_enabled() or needs_plain_ops(x, False) or any(hooked(m) for m in self.children())
            x = self.output(x) if plain else checkpoint(
                self.output, x, use_reentrant=False, preserve_rng_state=self.training and self.drop1.p > 0.)
        return self.drop2(x)
