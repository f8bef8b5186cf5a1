"""Attention heads as shifts of the image.

A head that gives all of its attention to one offset shifts the image by that offset. If all heads of a layer are
shifts s_h, the layer computes ``sum_h s_h(X) W_h``, a convolution with a sparse kernel: one gather and one product.
Beyond the border a shift takes the nearest pixel.
"""
import copy
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.layers import register_notrace_module
from timm.models.convit import ConVit

from timm_selfconv.layers import GatedAttention, SelfAttention2d
from timm_selfconv.layers.functional import maps_of_factors
from timm_selfconv.layers.parameters import ATTENTION, check_dense
from .learned_kernels import HeadOffset, Offset, check_threshold, look_at_layers, most_attended
from .pruning import fuse

__all__ = ['ShiftAttention2d', 'ShiftReport', 'to_shifts', 'with_shifts']

Shift = Tuple[int, Offset]  # a head and its offset
ALPHA = 46.  # sharpness of a shift by weights, in 1 / pixels^2: other pixels get less than 1e-19


@dataclass(frozen=True)
class ShiftReport:
    """Heads that became shifts.

    Attributes:
        shifts: (head, (row, column)) pairs for each layer, once for a shared layer, offsets in pixels from the query.
        lost: For each layer the mean attention that these heads gave to other pixels, None without shifts. The
            conversion of a layer is exact if this is 0.
    """
    shifts: List[List[Shift]]
    lost: List[Optional[float]]


@register_notrace_module
class ShiftAttention2d(nn.Module):
    """Attention layer in which some or all heads are shifts: input and output have shape (B, H, W, dim).

    Offsets are fixed. Dropout of attention probabilities does not apply to shifts.

    Attributes:
        offsets: Offsets of the shifts in pixels, a buffer of shape (shifts, 2).
        value: Value matrices of the shifts.
        rest: The other heads as attention, without the last Linear; None if all heads are shifts.
        proj: The last Linear.
    """
    offsets: torch.Tensor

    def __init__(self, attn: SelfAttention2d, shifts: Sequence[Shift]):
        """
        Args:
            attn: The layer. It stays unchanged.
            shifts: Heads, each once, and their (row, column) offsets.
        """
        super().__init__()
        heads = [head for head, _ in shifts]
        others = [head for head in range(attn.num_heads) if head not in heads]
        if not heads or len(heads) + len(others) != attn.num_heads:
            raise ValueError(f'shifts={list(shifts)}: needs heads from 0 to {attn.num_heads - 1}, each once')
        self.dim, self.num_heads, self.terms = attn.dim, attn.num_heads, attn.terms
        offsets = torch.tensor([offset for _, offset in shifts])
        if offsets.shape[1:] != (2,) or bool((offsets != offsets.long()).any()):
            raise ValueError(f'shifts={list(shifts)}: needs whole offsets, (row, column)')
        self.register_buffer('offsets', offsets.long().to(next(attn.parameters()).device))
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
        height, width = x.shape[1:3]
        rows, cols = (
            (torch.arange(n, device=x.device)[:, None] + offset).clamp(0, n - 1)
            for n, offset in zip((height, width), self.offsets.T))
        keys = (rows[:, None] * width + cols).flatten()
        out = self.value(x.flatten(1, 2).index_select(1, keys).view(len(x), height, width, -1))
        if self.rest is not None:
            out = out + self.rest(x)
        return self.proj_drop(self.proj(out))


def position_layers(model: nn.Module) -> Dict[str, SelfAttention2d]:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SelfAttention2d)}
    if not layers or any(layer.terms != ('position',) for layer in layers.values()):
        raise ValueError(
            f'model={type(model).__name__}: needs SelfAttention2d layers that attend by position only; heads that look '
            'at content are no shifts')
    return layers


def with_shifts(model: nn.Module, shifts: Sequence[Sequence[Shift]]) -> nn.Module:
    """Copy a net and replace given heads by shifts. To load saved weights of a net of shifts, pass its report's shifts.

    Args:
        model: See :func:`to_shifts`. Merge its adapters (LoRA) first.
        shifts: (head, (row, column)) pairs for each layer, offsets in pixels from the query.

    Raises:
        ValueError: If a layer looks at content, the number of layers is wrong, a head does not exist, an offset is not
            whole, or part of a layer is wrapped, parametrized or hooked.
    """
    layers = position_layers(model)
    if len(shifts) != len(layers):
        raise ValueError(f'shifts for {len(shifts)} layers: needs them for {len(layers)}')
    check_dense(model, ATTENTION)
    net = copy.deepcopy(model)
    for (name, layer), own in zip(layers.items(), shifts):
        if own:
            net.set_submodule(name, ShiftAttention2d(layer, own))
    return net


def report_shifts(layers: Sequence[List[HeadOffset]], threshold: float) -> ShiftReport:
    chosen = [[(number, head) for number, head in enumerate(heads) if head.least >= threshold] for heads in layers]
    return ShiftReport(
        [[(number, head.offset) for number, head in own] for own in chosen],
        [1 - sum(head.mean for _, head in own) / len(own) if own else None for own in chosen])


@torch.no_grad()
def convit_to_shifts(model: ConVit, threshold: float) -> Tuple[nn.Module, ShiftReport]:
    """Make the attention of ConViT by position sharp Gaussians around offsets (Lemma 2)."""
    net = fuse(model)
    layers = [layer for layer in net.modules() if isinstance(layer, GatedAttention)]
    maps = [maps_of_factors(*layer.factors()).unflatten(-1, layer.grid_size).unflatten(-3, layer.grid_size)
            for layer in layers]
    report = report_shifts(list(map(most_attended, maps)), threshold)
    for layer, shifts in zip(layers, report.shifts):
        for head, (row, col) in shifts:
            layer.pos_proj.weight[head] = ALPHA * layer.pos_proj.weight.new_tensor([2 * col, 2 * row, -1])
    return net, report


def to_shifts(model: nn.Module, threshold: float = 0.2) -> Tuple[nn.Module, ShiftReport]:
    """Replace heads that attend to one offset by shifts of the image. Other heads remain attention.

    The heads of ConViT attend by content and by position. Only their attention by position becomes a shift, by weights
    alone, and the report has a list for each layer with such heads.

    Args:
        model: A timm model with :class:`SelfAttention2d` layers that attend by position only, or timm's ConViT. It
            stays unchanged. Its image size gives the grid on which offsets are found; the result takes the same sizes.
        threshold: Least attention, from 0 to 1, that a head has to give to its offset at every query. 0 replaces all
            heads, each by its most attended offset.

    Returns:
        The net, in the same mode and on the same device, and a report.

    Raises:
        ValueError: If the net looks at content or has no such layers, the threshold is not from 0 to 1, or part of a
            layer is wrapped, parametrized or hooked.
    """
    check_threshold(threshold)
    if isinstance(model, ConVit):
        return convit_to_shifts(model, threshold)
    layers = position_layers(model)
    # shared layers run several times, with the same maps
    report = report_shifts(look_at_layers(model, None, most_attended)[:len(layers)], threshold)
    return with_shifts(model, report.shifts), report
