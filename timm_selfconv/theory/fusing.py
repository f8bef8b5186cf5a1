"""Nets for inference: the second Linear of an attention layer is part of its values.

A layer that attends by position only returns ``P (sum_h (R_h (x) C_h) x W_h + b) + p``, with ``R_h`` over rows and
``C_h`` over columns, and ``P W_h`` is one matrix. timm's ConViT becomes one without maps, which trains too.
"""
import copy

import torch.nn as nn
from timm.models.convit import ConVit

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.parameters import check_dense
from timm_selfconv.models import fuse_convit

__all__ = ['fuse']


def fuse(model: nn.Module) -> nn.Module:
    """A copy of a net for inference, its logits equal to rounding.

    In every attention layer the Linear after the value product is folded into it, see :meth:`SelfAttention2d.fuse`. The
    rest stays as it is. Of timm's ConViT, ``convit_*``, the copy holds no attention map and takes images of any size,
    see :class:`timm_selfconv.models.FusedConVit`; its mode, parameters and their names stay, so it trains too, and
    weights load both ways.

    Args:
        model: A net with :class:`SelfAttention2d` layers: any of ours with any encoding and terms, made by
            :mod:`timm_selfconv.theory` or pruned, also one made for features only; or timm's ConViT. It is left as it
            is.

    Returns:
        The copy, in eval mode and its parameters frozen, but for a ConViT's. It takes any image size that the net
        takes, and moves to any device and dtype.

    Raises:
        ValueError: If the net has no such layers, or hooks on what is folded.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, SelfAttention2d):
            check_dense(layer, ('value', 'proj'), name)
    fused = copy.deepcopy(model)
    convits = [m for m in fused.modules() if isinstance(m, ConVit)]
    for convit in convits:
        fuse_convit(convit)
    if convits:
        return fused
    fused.eval().requires_grad_(False)
    layers = [(n, m) for n, m in fused.named_modules(remove_duplicate=False) if isinstance(m, SelfAttention2d)]
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to fuse, and is no ConViT')
    for name, layer in layers:
        folded = SelfAttention2d.fuse(layer)  # not the method of a subclass
        if not name:
            return folded
        fused.set_submodule(name, folded)
    return fused
