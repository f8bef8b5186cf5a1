"""Linear maps by the fastest kernel that a CPU has for them."""
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function
from torch.nn.modules.module import _has_any_global_hook

from .observed import counted, hooked, needs_plain_ops

__all__ = ['apply_linear', 'autocast_dtype', 'linear', 'weight_gradient']

ONEDNN = torch.backends.mkldnn.is_available()


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype that a linear map of x computes in: autocast's where that is on, but float64 stays."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def through_onednn(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """Decide whether oneDNN takes a product of tensors: where it is faster than torch's own choice and may be seen.

    That choice is MKL in float32, which uses half of the width of vectors on processors that are not Intel's.
    """
    # counters of products do not know its operator
    if not ONEDNN or needs_plain_ops(x) or counted() or x.numel() == 0 or torch.is_autocast_enabled('cpu'):
        return False
    for t in (x, *others):
        if t is not None and (t.dtype != torch.float32 or t.device.type != 'cpu'
                              or (t.requires_grad and torch.is_grad_enabled())):
            return False
    return True


@torch.fx.wrap
@register_notrace_function
def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`F.linear` of x by the faster library; without a bias it may be written to ``out``."""
    if through_onednn(x, weight, bias) and x.shape[-1] == weight.shape[-1]:  # torch says what does not fit
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
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


def apply_linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a layer on x; torch's own Linear, unless hooks or tracers wait for the call, by the faster library.

    A function, not a subclass of Linear: quantisation, pruning and adapters choose layers by their type.
    """
    if needs_plain_ops(x) or type(layer) is not nn.Linear or hooked(layer) or _has_any_global_hook():
        return layer(x)
    return linear(x, layer.weight, layer.bias)
