"""Vision transformer on the features of a ResNet's first stage.

'An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale', Dosovitskiy et al., ICLR 2021
- https://arxiv.org/abs/2010.11929
'[Re] On the Relationship between Self-Attention and Convolutional Layers', Varma T, Prabhu, 2021 (this net, and the
hierarchical one)

Heads are as wide as the layer. There is no final norm, and the classifier uses the mean of all tokens, with the class
token. The class token is the embedding of a patch of zeros.
"""
import functools
from typing import Any, Dict, Set, Tuple, Union

import torch
import torch.nn as nn

from timm.layers import ClassifierHead, calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from timm.models import generate_default_cfgs, register_model
from timm.models._input import get_pretrained_grid_size
from timm.models.resnet import BasicBlock

from timm_selfconv.layers import TokenAttention
from timm_selfconv.layers.parameters import check_sizes
from ._base import Block, BlockNet, to_grid_size
from ._cfg import build_net, cifar_cfgs

__all__ = ['ResVit']


@torch.fx.wrap
def check_grid(x: torch.Tensor, grid_size: Tuple[int, int]) -> torch.Tensor:
    if x.shape[2] != grid_size[0] or x.shape[3] != grid_size[1]:
        raise ValueError(
            f'{x.shape[2]} x {x.shape[3]} patches: the positions are learned for {grid_size[0]} x {grid_size[1]}; '
            f'create the model with another img_size or call set_input_size')
    return x


class ResVit(BlockNet):
    """Classifier of transformer blocks on patches of convolutional features."""

    def __init__(
            self,
            img_size: Union[int, Tuple[int, int]] = 32,
            patch_size: int = 2,
            in_chans: int = 3,
            num_classes: int = 10,
            global_pool: str = 'avg',
            stem_dim: int = 64,
            embed_dim: int = 400,
            depth: int = 6,
            num_heads: int = 9,
            mlp_dim: int = 512,
            hierarchical: bool = False,
            drop_rate: float = 0.,
            attn_drop_rate: float = 0.,
            drop_path_rate: float = 0.,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            img_size: Height and width of the images, in pixels.
            patch_size: Side of the patches, in pixels. The convolutional stem keeps the resolution.
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features only.
            global_pool: Pooling over all positions, '' for none.
            stem_dim: Channels of the stem and its two residual blocks.
            embed_dim: Channels of the tokens and of every head.
            depth: Number of layers.
            num_heads: Heads of every layer.
            mlp_dim: Hidden channels of the MLPs.
            hierarchical: Share one block, and the keys of its first input, between all layers (the report).
            drop_rate: Dropout rate of hidden states, after attention and MLP.
            attn_drop_rate: Dropout rate of attention probabilities.
            drop_path_rate: Stochastic depth rate of the last layer (linear from 0), or of a shared block.

        Raises:
            ValueError: If an argument is out of range.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(patch_size, in_chans, num_classes, embed_dim, depth, hierarchical)
        check_sizes(stem_dim=stem_dim, num_heads=num_heads, mlp_dim=mlp_dim)
        self.grid_size = to_grid_size(img_size, patch_size)

        self.conv1 = nn.Conv2d(in_chans, stem_dim, 3, padding=1, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(stem_dim, **dd)
        self.act1 = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(*[BasicBlock(stem_dim, stem_dim, **dd) for _ in range(2)])
        self.patch_embed = nn.Conv2d(stem_dim, embed_dim, patch_size, patch_size, **dd)
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid_size[0] * self.grid_size[1], embed_dim, **dd))

        drop_path_rates: Any = [drop_path_rate] if hierarchical else calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(*[
            Block(
                TokenAttention(embed_dim, num_heads, attn_drop=attn_drop_rate, proj_drop=drop_rate, **dd),
                embed_dim,
                mlp_dim,
                drop=drop_rate,
                drop_path=rate,
                pre_norm=True,
                **dd,
            )
            for rate in drop_path_rates
        ])
        self.head = ClassifierHead(embed_dim, num_classes, pool_type=global_pool, input_fmt=self.output_fmt, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.pos_embed, std=0.02)

    def no_weight_decay(self) -> Set[str]:
        return {'pos_embed'}

    @torch.jit.unused
    def image_elements(self, height: int, width: int) -> int:
        return self.blocks[0].attn.num_heads * self.num_features * self.pos_embed.shape[1]

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        table = resample_abs_pos_embed(self.pos_embed.detach(), list(grid_size), list(self.grid_size))
        self.pos_embed = nn.Parameter(table, self.pos_embed.requires_grad)
        self.grid_size = grid_size

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Embed images x: class token and patches plus positions, shape (B, 1 + H W, C)."""
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        class_token = self.patch_embed(torch.zeros_like(x[:, :, :self.patch_size, :self.patch_size]))
        x = check_grid(self.patch_embed(x), self.grid_size)
        return torch.cat([class_token.flatten(2), x.flatten(2)], dim=2).transpose(1, 2) + self.pos_embed

    def to_grid(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:].unflatten(1, self.grid_size)

    def to_features(self, x: torch.Tensor) -> torch.Tensor:
        """Add a share of the class token to the grid. The mean of the grid is then the mean of all tokens."""
        grid = self.to_grid(x)
        return grid + (x[:, :1, None] - grid) / x.shape[1]  # no sum of tokens, which would overflow 8-bit integers


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: ResVit) -> Dict[str, torch.Tensor]:
    """Resample the positions of a checkpoint for another image size (square if unknown)."""
    table = state_dict.get('pos_embed')
    if table is None:
        return state_dict
    old = get_pretrained_grid_size(model, state_dict.get('patch_embed.weight'), table.shape[1] - 1)
    if table.shape[1] == model.pos_embed.shape[1] and old in (None, model.grid_size):
        return state_dict
    return {**state_dict, 'pos_embed': resample_abs_pos_embed(table, list(model.grid_size), old)}


_cfgs = functools.partial(
    cifar_cfgs,
    first_conv='conv1', classifier='head.fc', fixed_input_size=True,
    paper_ids='arXiv:2010.11929',
    paper_name='An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale',
)

default_cfgs = generate_default_cfgs({
    **_cfgs('resvit_cifar', 'resvit_hier_cifar', pool_size=(16, 16)),
    **_cfgs('resvit_tiny_cifar', 'resvit_hier_tiny_cifar', pool_size=(8, 8)),
})


_create_resvit = functools.partial(build_net, ResVit, pretrained_filter_fn=checkpoint_filter_fn)

TINY = dict(patch_size=4, stem_dim=16, embed_dim=48, mlp_dim=192)


@register_model
def resvit_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """Six blocks on a ResNet's first stage (37.4M parameters, 84.3 % published by the report)."""
    return _create_resvit('resvit_cifar', pretrained, **kwargs)


@register_model
def resvit_hier_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """Six passes of one block on a ResNet's first stage (6.53M parameters, 87.7 % published by the report)."""
    model_args = dict(hierarchical=True)
    return _create_resvit('resvit_hier_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def resvit_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """A small model to train on a CPU: 16 channels in the stem, 48 on 8 x 8 patches (0.64M parameters)."""
    return _create_resvit('resvit_tiny_cifar', pretrained, **dict(TINY, **kwargs))


@register_model
def resvit_hier_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """A small hierarchical model to train on a CPU (0.13M parameters)."""
    model_args = dict(TINY, hierarchical=True)
    return _create_resvit('resvit_hier_tiny_cifar', pretrained, **dict(model_args, **kwargs))
