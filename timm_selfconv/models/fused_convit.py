"""timm's ConViT with separable positional attention, for images of any size.

'ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases', d'Ascoli et al., 2021
- https://arxiv.org/abs/2103.10697

The position scores of its heads have the paper's quadratic form, so they need no map and fit a grid of any shape.
"""
from typing import Any, Tuple, Union

import torch.nn as nn
from timm.layers import Attention, resample_abs_pos_embed, to_2tuple
from timm.models._input import update_model_input_size
from timm.models.convit import GPSA, MHSA, ConVit

from timm_selfconv.layers import GatedAttention
from timm_selfconv.layers.hooks import hooked
from ._base import to_grid_size

__all__ = ['FusedConVit', 'fuse_convit']


class FusedConVit(ConVit):
    """ConViT for images of any size, see :func:`fuse_convit`. Parameters have timm's names."""

    def __init__(self, model: ConVit):
        """Take over the modules, parameters and settings of a ConViT."""
        nn.Module.__init__(self)
        vars(self).update(vars(model))

    def set_input_size(self, img_size: Union[int, Tuple[int, int]]) -> None:
        """Set the image size (height, width) and resample position embeddings. Heads keep their offsets in patches.

        Raises:
            ValueError: If the size is not a multiple of the patch size.
        """
        patches: Any = self.patch_embed
        old_size = patches.grid_size
        to_grid_size(img_size, patches.feat_ratio())
        patches.set_input_size(to_2tuple(img_size))
        self.num_patches = patches.num_patches
        if self.use_pos_embed:
            table = resample_abs_pos_embed(
                self.pos_embed.detach(), list(patches.grid_size), list(old_size), num_prefix_tokens=0)
            self.pos_embed = nn.Parameter(table.clone(), self.pos_embed.requires_grad)
        for module in self.modules():
            if isinstance(module, GatedAttention):
                module.grid_size = patches.grid_size
        update_model_input_size(self, img_size)


def fuse_convit(model: Any) -> Any:
    """Replace the attention of timm's ConViT, in place, by :class:`GatedAttention` and timm's fused attention.

    Returns:
        A :class:`FusedConVit` with the same modules; the model itself if it is a subclass of ConVit.

    Raises:
        ValueError: If a layer has hooks.
    """
    for i, block in enumerate(model.blocks):
        old = block.attn
        if type(old) in (GPSA, MHSA) and hooked(old):
            raise ValueError(f'blocks.{i}.attn is a {type(old).__name__} with hooks: needs one without to be fused')
        if type(old) is GPSA:
            if type(old.pos_proj) is not nn.Linear or hooked(old.pos_proj):
                raise ValueError(
                    f'blocks.{i}.attn.pos_proj is a {type(old.pos_proj).__name__}: needs a torch.nn.Linear, no hooks')
            block.attn = GatedAttention(old, model.patch_embed.grid_size)
        elif type(old) is MHSA:
            dim = old.proj.in_features
            block.attn = Attention(dim, old.num_heads, device='meta').train(old.training)
            for name, module in old.named_children():
                setattr(block.attn, name, module)
    return FusedConVit(model) if type(model) is ConVit else model
