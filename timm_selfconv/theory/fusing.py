"""Nets for inference: the second Linear of each attention layer is folded into its values."""
import copy

import torch.nn as nn
from timm.models import reparameterize_model
from timm.models.convit import ConVit

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.parameters import check_dense
from timm_selfconv.models import fuse_convit

__all__ = ['fuse']


def fuse(model: nn.Module) -> nn.Module:
    """Copy a net for inference; the logits are equal to rounding. See :meth:`SelfAttention2d.fuse`.

    A copy of timm's ConViT keeps its parameters and mode, can be trained, and takes images of any size; see
    :class:`timm_selfconv.models.FusedConVit`.

    Args:
        model: A net or layer with :class:`SelfAttention2d`, or timm's ConViT. It stays unchanged.

    Returns:
        The copy, in eval mode with frozen parameters, except for a ConViT.

    Raises:
        ValueError: If the net has no such layers, or folded layers are adapted or hooked.
    """
    if isinstance(model, ConVit):
        return fuse_convit(copy.deepcopy(model))
    if isinstance(model, SelfAttention2d):
        return model.fuse()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, SelfAttention2d)]
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to fuse, and is no ConViT')
    for name, layer in layers:
        check_dense(layer, ('value', 'proj'), name)
    return reparameterize_model(model).eval().requires_grad_(False)
