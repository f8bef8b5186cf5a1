"""Attention maps: where every query of a net looks."""
import contextlib
from typing import Any, Iterator, List, Tuple

import torch
import torch.nn as nn

from timm_selfconv.layers import SelfAttention2d

__all__ = ['attention_maps', 'explicit_maps']


@contextlib.contextmanager
def explicit_maps(model: nn.Module) -> Iterator[None]:
    """Run a net's attention through explicit maps meanwhile, as timm does where fused attention is off."""
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    before = [layer.fused_attn for layer in layers]
    try:
        for layer in layers:
            layer.fused_attn = False
        yield
    finally:
        for layer, fused_attn in zip(layers, before):
            layer.fused_attn = fused_attn


def attention_maps(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Attention probabilities of every layer, in eval mode.

    The maps are computed beside the forward pass from what enters each layer, so they are the same whether the net runs
    through row and column factors, a fused kernel or the explicit map. A net's own mode is restored.

    Args:
        model: Net with :class:`SelfAttention2d` layers.
        images: Images as the net takes them, shape (B, C, height, width).

    Returns:
        One tensor a layer, in the order they run, shape (B, heads, H, W, H, W), query pixel first; each query's map
        sums to 1. Maps that don't depend on the image are expanded over the batch, not copied.

    Raises:
        ValueError: If the model has no such layers.
    """
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to look into')

    maps: List[torch.Tensor] = []

    def look(layer: Any, args: Tuple[torch.Tensor, ...]) -> None:
        maps.append(layer.attention_probs(*args))

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(images)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return maps
