"""Attention without attention: heads that look at one offset, as shifts of the image.

With ``s_h`` the shift by the offset of head h, a layer of shifts returns ``sum_h s_h(X) W_h``: a convolution with a
sparse kernel, which is a gather and one product. Beyond the border a shift has the nearest pixel.
"""
import copy
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.layers import register_notrace_module

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.parameters import ATTENTION, check_dense
from .learned_kernels import Offset, learned_kernels

__all__ = ['ShiftAttention2d', 'ShiftReport', 'to_shifts', 'with_shifts']

Shift = Tuple[int, Offset]  # a head and its offset


@dataclass(frozen=True)
class ShiftReport:
    """Heads that became shifts.

    Attributes:
        shifts: For each layer a list of (head, (row, column)), offsets in pixels from the query.
        lost: For each layer the attention that these heads gave to other pixels, mean over heads and queries; None
            without shifts. 0 is an exact conversion.
        heads: Number of heads of the net.
    """
    shifts: List[List[Shift]]
    lost: List[Optional[float]]
    heads: int

    def __str__(self) -> str:
        numbers = [len(layer) for layer in self.shifts]
        return f'{sum(numbers)} of {self.heads} heads are shifts, by layer {", ".join(map(str, numbers))}'


@register_notrace_module
class ShiftAttention2d(nn.Module):
    """An attention layer whose heads, or some of them, are shifts: input and output have shape (B, H, W, dim).

    Weights train, offsets do not. Dropout of attention probabilities leaves shifts alone.

    Attributes:
        offsets: Offsets of the shifts in pixels, a buffer of shape (shifts, 2).
        value: Values of the shifts, as :class:`SelfAttention2d` has them.
        rest: The other heads, without the Linear after their values; None without other heads.
        proj: The Linear after the values of all heads.
    """
    offsets: torch.Tensor

    def __init__(self, attn: SelfAttention2d, shifts: Sequence[Shift]):
        """
        Args:
            attn: The layer; it is left as it is.
            shifts: Heads, each once, and their (row, column) offsets.

        Raises:
            ValueError: If there is no shift, or a head does not exist or stands twice.
        """
        super().__init__()
        heads = [head for head, _ in shifts]
        others = [head for head in range(attn.num_heads) if head not in heads]
        if not heads or len(heads) + len(others) != attn.num_heads:
            raise ValueError(f'shifts={list(shifts)}: needs heads from 0 to {attn.num_heads - 1}, each once')
        self.dim, self.num_heads, self.terms = attn.dim, attn.num_heads, attn.terms
        self.register_buffer('offsets', torch.tensor(
            [offset for _, offset in shifts], device=next(attn.parameters()).device).long())
        own: Any = copy.deepcopy(attn)
        own.keep_heads(heads)
        self.value, self.proj, self.proj_drop = own.value, own.proj, own.proj_drop
        self.rest: Any = None
        if others:
            self.rest = copy.deepcopy(attn)
            self.rest.keep_heads(others)
            self.rest.proj = self.rest.proj_drop = nn.Identity()
            self.value.bias = None  # the other heads have it

    def forward(self, x: torch.Tensor, key: None = None) -> torch.Tensor:
        """Shift and attend; there are no keys, as no head looks at content."""
        height, width = x.shape[1], x.shape[2]
        rows, cols = (
            (torch.arange(n, device=x.device)[:, None] + offset).clamp(0, n - 1)
            for n, offset in zip((height, width), self.offsets.T))
        keys = (rows[:, None] * width + cols).flatten()
        out = self.value(x.flatten(1, 2).index_select(1, keys).view(len(x), height, width, -1))
        if self.rest is not None:
            out = out + self.rest(x)
        return self.proj_drop(self.proj(out))


def with_shifts(model: nn.Module, shifts: Sequence[Sequence[Shift]]) -> nn.Module:
    """A net with given shifts for some heads. With those of a report it loads the weights of such a net.

    Args:
        model: A net with :class:`SelfAttention2d` layers that attend by position only. Merge its adapters (LoRA) first.
        shifts: For each layer the (head, (row, column)) to replace, offsets in pixels from the query.

    Returns:
        A copy of the net, in the same mode and on the same device.

    Raises:
        ValueError: If a layer looks at content, shifts and layers differ in number, there is no such head, or part of a
            layer is wrapped, parametrized or hooked.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, SelfAttention2d)]
    if not layers or any(layer.terms != ('position',) for _, layer in layers):
        raise ValueError(
            f'model={type(model).__name__}: needs SelfAttention2d layers that attend by position only; heads that look '
            'at content are no shifts')
    if len(shifts) != len(layers):
        raise ValueError(f'shifts for {len(shifts)} layers: needs them for {len(layers)}')
    check_dense(model, ATTENTION)
    net = copy.deepcopy(model)
    for (name, _), own in zip(layers, shifts):
        layer: Any = net.get_submodule(name)
        if own:
            net.set_submodule(name, ShiftAttention2d(layer, own))
    return net


def to_shifts(model: nn.Module, threshold: float = 0.2) -> Tuple[nn.Module, ShiftReport]:
    """Replace heads that look at one offset by shifts of the image; the others stay attention.

    A layer of shifts only is a convolution with a sparse kernel. The conversion is exact for one-hot maps, borders
    included; otherwise the report says how much attention is lost.

    Args:
        model: A net made by timm with :class:`SelfAttention2d` layers that attend by position only; it is left as it
            is. Its offsets are found on the grid of its image size; the result takes other sizes as it does.
        threshold: Attention that a head has to give to one offset at every query, from 0 to 1; 0 replaces all heads, by
            their most attended offsets.

    Returns:
        The net, in the same mode and on the same device, and the report.

    Raises:
        ValueError: If the net looks at content or has no such layers, or the threshold is no share.
    """
    with_shifts(model, [[] for m in model.modules() if isinstance(m, SelfAttention2d)])  # refuses other nets
    kernels = learned_kernels(model, threshold=threshold)
    shifts = [[(number, head.offset) for number, head in enumerate(kernel.heads) if head.least >= threshold]
              for kernel in kernels]
    lost = [
        1 - sum(kernel.heads[number].mean for number, _ in own) / len(own) if own else None
        for kernel, own in zip(kernels, shifts)]
    return with_shifts(model, shifts), ShiftReport(shifts, lost, sum(len(kernel.heads) for kernel in kernels))
