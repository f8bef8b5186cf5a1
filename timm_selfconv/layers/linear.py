"""Linear maps by the fastest kernel that a CPU has for them."""
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, register_notrace_module

from .onlookers import counted, traced

__all__ = ['Linear', 'autocast_dtype', 'linear', 'weight_gradient']

ONEDNN = torch.backends.mkldnn.is_available()


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """What a linear map of x computes in: autocast's dtype where that is on, but float64 stays."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def through_onednn(*tensors: torch.Tensor) -> bool:
    """Whether oneDNN is faster at a product of tensors than torch's own choice, and nobody looks on.

    That choice is MKL in float32, which uses half of the width of vectors on processors that are not Intel's.
    """
    x = tensors[0]
    return (
        ONEDNN and x.dtype == torch.float32 and x.device.type == 'cpu' and x.numel() > 0
        and not torch.is_autocast_enabled('cpu') and not any(map(traced, tensors))
        and not counted())  # who counts products does not know its operator


@torch.fx.wrap
@register_notrace_function
def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`F.linear` of x and a contiguous weight by the faster library; without a bias it may be written to ``out``."""
    if through_onednn(x, weight) and x.shape[-1] == weight.shape[-1]:  # torch says what does not fit
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Gradient ``grad' x`` of :func:`linear` with respect to its weight, for matrices; it may be written to ``out``.

    Args:
        grad: The result's gradient transposed, as both libraries want it: contiguous, shape (out_features, rows).
        x: Shape (rows, in_features).
        out: Shape (out_features, in_features).
    """
    return linear(grad, x.T.contiguous()) if through_onednn(x) else torch.mm(grad, x, out=out)


@register_notrace_module
class Linear(nn.Linear):
    """torch's, which in float32 on a CPU runs at oneDNN's speed where no gradient is asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From shape (..., in_features) to (..., out_features)."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        else:  # torchscript compiles what follows a return, but not an else
            return linear(x, self.weight, self.bias)
