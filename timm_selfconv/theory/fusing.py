"""Nets for inference: the second Linear is part of the values, and wide heads run at their rank.

A layer that attends by position only returns ``P (sum_h (R_h (x) C_h) x W_h + b) + p``, with ``R_h`` over rows and
``C_h`` over columns, and ``P W_h`` is one matrix. timm's ConViT becomes one without maps, which trains too.
"""
import copy
from typing import Optional

import torch.nn as nn
from timm.models.convit import ConVit

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.models import fuse_convit

__all__ = ['fuse']


def fuse(model: nn.Module, tolerance: Optional[float] = None) -> nn.Module:
    """A copy of a net for inference, its logits equal to rounding; with a tolerance faster, and as near as that says.

    In every attention layer the Linear after the value product is folded into it, see :meth:`SelfAttention2d.fuse`. The
    rest stays as it is. Of timm's ConViT, ``convit_*``, the copy holds no attention map and takes images of any size,
    see :class:`timm_selfconv.models.FusedConVit`; its mode, parameters and their names stay, so it trains too, and
    weights load both ways.

    Args:
        model: A net with :class:`SelfAttention2d` layers: any of ours with any encoding and terms, made by
            :mod:`timm_selfconv.theory` or pruned, also one made for features only; or timm's ConViT. It is left as it
            is.
        tolerance: What the attention map ``A_h`` of each such head, queries by keys, may lose in operator norm, between
            0 and 1 (the norm of a map is at least 1). So for the hidden states X of an image what head h gathers is off
            by at most ``tolerance ||X||`` and a layer's output by at most ``tolerance ||X|| sum_h ||P W_h||``, in
            Frobenius norms with the operator norms of the weights, and no attention probability by more than the
            tolerance. Heads become low rank where this is faster. Rounding comes on top. None keeps all heads whole, as
            a ConViT's must be.

    Returns:
        The copy, in eval mode and its parameters frozen, but for a ConViT's. It takes any image size that the net
        takes, and moves to any device and dtype. With gradients and under compilers all heads are whole.

    Raises:
        ValueError: If the net has no such layers, hooks on what is folded, or the tolerance is out of range.
    """
    fused = copy.deepcopy(model)
    convits = [m for m in fused.modules() if isinstance(m, ConVit)]
    if convits and tolerance is not None:
        raise ValueError(f'tolerance={tolerance!r}: a ConViT keeps its heads whole, needs None')
    for convit in convits:
        fuse_convit(convit)
    if convits:
        return fused
    fused.eval().requires_grad_(False)
    layers = {}
    for name, module in fused.named_modules():
        if isinstance(module, SelfAttention2d):
            try:
                layers[module] = SelfAttention2d.fuse(module, tolerance)  # not what a subclass makes of itself
            except ValueError as e:
                raise ValueError(f'{name}.{e}' if name else str(e)) from e
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to fuse, and is no ConViT')
    for name, module in list(fused.named_modules(remove_duplicate=False)):
        if module in layers and name:
            fused.set_submodule(name, layers[module])
    return layers[fused] if isinstance(fused, SelfAttention2d) else fused
