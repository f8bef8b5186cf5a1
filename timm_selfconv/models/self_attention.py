"""Self-attention networks that can express any convolution.

'On the Relationship between Self-Attention and Convolutional Layers', Cordonnier, Loukas, Jaggi, ICLR 2020
- https://arxiv.org/abs/1911.03584
'[Re] On the Relationship between Self-Attention and Convolutional Layers', Varma T, Prabhu, 2021 (hierarchical nets)

Six post-norm transformer layers on the pixels of a 2x downsampled image; each head is as wide as the layer. Variants
differ in the terms of the attention score (the paper's equation 8) and in the position encoding, see
:class:`timm_selfconv.layers.SelfAttention2d`. Hierarchical nets repeat one layer and compute its keys once.
"""
import functools
from typing import Any, Dict, Sequence, Tuple, Union

import torch
import torch.nn as nn

from timm.layers import ClassifierHead, LayerType, calculate_drop_path_rates, resample_abs_pos_embed_nhwc
from timm.models import generate_default_cfgs, register_model

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.encodings import resample_table
from timm_selfconv.layers.parameters import check_sizes
from ._base import Block, BlockNet, to_grid_size
from ._cfg import build_net, cifar_cfgs
from ._released import convert_released

__all__ = ['SelfAttentionNet']


class SelfAttentionNet(BlockNet):
    """Classifier of self-attention layers on a grid of pixels, channels last throughout."""

    def __init__(
            self,
            img_size: Union[int, Tuple[int, int]] = 32,
            patch_size: int = 2,
            in_chans: int = 3,
            num_classes: int = 10,
            global_pool: str = 'avg',
            embed_dim: int = 400,
            depth: int = 6,
            num_heads: Union[int, Sequence[int]] = 9,
            mlp_dim: int = 512,
            terms: Sequence[str] = ('position',),
            encoding: str = 'quadratic',
            hierarchical: bool = False,
            qk_bias: bool = True,
            attn_proj: bool = True,
            act_layer: LayerType = 'gelu',
            norm_eps: float = 1e-12,
            drop_rate: float = 0.,
            attn_drop_rate: float = 0.,
            drop_path_rate: float = 0.,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            img_size: Height and width of the images, in pixels. Used by learned encodings only.
            patch_size: Side of the patches, in pixels.
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features only.
            global_pool: Pooling over all positions, '' for none.
            embed_dim: Channels of the layers and of every head.
            depth: Number of layers.
            num_heads: Heads of every layer, or one number per layer.
            mlp_dim: Hidden channels of the MLPs.
            terms: Terms of the attention score, see :class:`SelfAttention2d`.
            encoding: Position encoding, see :class:`SelfAttention2d`.
            hierarchical: Share one block, and the keys of its first input, between all layers (the report).
            qk_bias: Give queries and keys a bias.
            attn_proj: Add a second Linear after the values.
            act_layer: Activation of the MLPs.
            norm_eps: Epsilon of the LayerNorms.
            drop_rate: Dropout rate of hidden states, after attention and MLP (the paper: 0.1).
            attn_drop_rate: Dropout rate of attention probabilities (the paper: 0.1).
            drop_path_rate: Stochastic depth rate of the last layer (linear from 0), or of a shared block.

        Raises:
            ValueError: If an argument is out of range, or the encoding does not support the terms.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(patch_size, in_chans, num_classes, embed_dim, depth, hierarchical)
        check_sizes(mlp_dim=mlp_dim)
        num_blocks = 1 if hierarchical else depth
        heads = tuple(num_heads) if isinstance(num_heads, Sequence) else (num_heads,) * num_blocks
        if len(heads) != num_blocks:
            raise ValueError(f'num_heads={num_heads!r}: needs one number, or one for each of {num_blocks} layers')
        grid_size = to_grid_size(img_size, patch_size)
        drop_path_rates: Any = [drop_path_rate] if hierarchical else calculate_drop_path_rates(drop_path_rate, depth)

        self.stem = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size, **dd)
        self.blocks = nn.Sequential(*[
            Block(
                SelfAttention2d(
                    embed_dim,
                    block_heads,
                    terms=terms,
                    encoding=encoding,
                    grid_size=grid_size,
                    qk_bias=qk_bias,
                    proj=attn_proj,
                    attn_drop=attn_drop_rate,
                    proj_drop=drop_rate,
                    **dd,
                ),
                embed_dim,
                mlp_dim,
                drop=drop_rate,
                drop_path=rate,
                act_layer=act_layer,
                norm_eps=norm_eps,
                **dd,
            )
            for block_heads, rate in zip(heads, drop_path_rates)
        ])
        self.shares_key = hierarchical and self.blocks[0].attn.key is not None
        self.head = ClassifierHead(embed_dim, num_classes, pool_type=global_pool, input_fmt=self.output_fmt, **dd)

    @property
    @torch.jit.unused
    def num_heads(self) -> Tuple[int, ...]:
        """Number of heads of each block."""
        return tuple(block.attn.num_heads for block in self.blocks)

    @torch.jit.unused
    def image_elements(self, height: int, width: int) -> int:
        pixels = height // self.patch_size * (width // self.patch_size)
        return max([
            attn.num_heads * pixels * (attn.dim if attn.separable else max(attn.dim, pixels))
            for attn in (block.attn for block in self.blocks) if isinstance(attn, SelfAttention2d)], default=0)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Downsample images x, shape (B, C, height, width), to a grid, shape (B, H, W, C)."""
        return self.stem(x).permute(0, 2, 3, 1)


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: SelfAttentionNet) -> Dict[str, torch.Tensor]:
    """Convert checkpoints of the released code, resample positions, and check the number of heads."""
    state_dict = state_dict.get('model_state_dict', state_dict)
    if 'features_upscale.weight' in state_dict:  # the released code's layout
        state_dict = convert_released(state_dict, model.patch_size)

    values = [state_dict.get(f'blocks.{i}.attn.value.weight') for i in range(len(model.blocks))]
    heads = tuple(weight.shape[1] // weight.shape[0] for weight in values if weight is not None)
    if len(heads) == len(model.num_heads) and heads != model.num_heads:
        raise ValueError(
            f'num_heads={model.num_heads}: the checkpoint has {heads} heads per layer, so create the model with '
            f'num_heads={heads}')

    target = model.state_dict()
    out = {}
    for name, value in state_dict.items():
        if name in target and value.shape != target[name].shape:
            if name.endswith(('encoding.row_table', 'encoding.col_table')):
                value = resample_table(value, (target[name].shape[0] + 1) // 2)
            elif name.endswith('encoding.table'):
                value = resample_abs_pos_embed_nhwc(value, list(target[name].shape[:2]))[0]
        out[name] = value
    return out


_cfgs = functools.partial(
    cifar_cfgs,
    first_conv='stem', classifier='head.fc',
    paper_ids='arXiv:1911.03584',
    paper_name='On the Relationship between Self-Attention and Convolutional Layers',
    origin_url='https://github.com/epfml/attention-cnn',
)

_cfgs_learned = functools.partial(_cfgs, fixed_input_size=True)

default_cfgs = generate_default_cfgs({
    **_cfgs(
        'sa_quadratic_cifar',
        'sa_quadratic_gen_cifar',
        'sa_quadratic_gen_pruned_cifar',
        'sa_quadratic_h16_cifar',
        pool_size=(16, 16),
    ),
    **_cfgs_learned(
        'sa_learned_cifar',
        'sa_learned_content_cifar',
        'sa_learned_h16_cifar',
        'sa_learned_content_h16_cifar',
        'sa_learned_content_hier_cifar',
        'sa_learned_content_hier_h16_cifar',
        pool_size=(16, 16),
    ),
    **_cfgs(
        'sa_quadratic_tiny_cifar',
        'sa_quadratic_gen_tiny_cifar',
        'sa_quadratic_h16_tiny_cifar',
        pool_size=(8, 8),
    ),
    **_cfgs_learned(
        'sa_learned_tiny_cifar',
        'sa_learned_h16_tiny_cifar',
        'sa_learned_content_tiny_cifar',
        'sa_learned_content_hier_tiny_cifar',
        pool_size=(8, 8),
    ),
})


_create_self_attention = functools.partial(build_net, SelfAttentionNet, pretrained_filter_fn=checkpoint_filter_fn)

CONTENT = ('content', 'content_position')
# of the report
HIERARCHICAL = dict(
    encoding='learned', terms=CONTENT, hierarchical=True, qk_bias=False, attn_proj=False, act_layer='relu',
    norm_eps=1e-5)
TINY = dict(patch_size=4, embed_dim=96, mlp_dim=192)


@register_model
def sa_quadratic_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Quadratic encoding, isotropic Gaussian heads: the paper's 'SA quadratic emb.' (12.1M, 93.8 % published)."""
    return _create_self_attention('sa_quadratic_cifar', pretrained, **kwargs)


@register_model
def sa_quadratic_gen_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Quadratic encoding with a full precision per head: the paper's 'SA quadratic emb. gen.' (12.1M, 93.4 %)."""
    model_args = dict(encoding='quadratic_gen')
    return _create_self_attention('sa_quadratic_gen_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_quadratic_gen_pruned_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """The general quadratic net without its degenerate heads: 'quadratic emb. gen. pruned' (9.7M, 93.4 %)."""
    model_args = dict(encoding='quadratic_gen', num_heads=(7, 5, 8, 7, 3, 9))
    return _create_self_attention('sa_quadratic_gen_pruned_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Learned relative encoding, position only: the paper's 'SA learned emb.' (12.3M, 91.8 %)."""
    model_args = dict(encoding='learned')
    return _create_self_attention('sa_learned_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Learned relative encoding and content: the paper's 'SA learned emb. + content' (29.5M, 87.1 %)."""
    model_args = dict(encoding='learned', terms=CONTENT)
    return _create_self_attention('sa_learned_content_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_quadratic_h16_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """`sa_quadratic_cifar` with 16 heads of 256 channels: Table 2 of the report (93.1 %)."""
    model_args = dict(embed_dim=256, num_heads=16)
    return _create_self_attention('sa_quadratic_h16_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_h16_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """`sa_learned_cifar` with 16 heads of 256 channels: the report's Table 2 (91.2 %), without its second value map."""
    model_args = dict(encoding='learned', embed_dim=256, num_heads=16)
    return _create_self_attention('sa_learned_h16_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_h16_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """`sa_learned_content_cifar`, 16 heads, 256 channels: Table 2 of the report (85.6 %), one value map fewer."""
    model_args = dict(encoding='learned', terms=CONTENT, embed_dim=256, num_heads=16)
    return _create_self_attention('sa_learned_content_h16_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_hier_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Learned encoding with content, hierarchical: six passes of one layer (4.75M, 91.0 % published by the report)."""
    return _create_self_attention('sa_learned_content_hier_cifar', pretrained, **dict(HIERARCHICAL, **kwargs))


@register_model
def sa_learned_content_hier_h16_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """Learned encoding with content, hierarchical, with 16 heads of 256 channels."""
    model_args = dict(HIERARCHICAL, embed_dim=256, num_heads=16)
    return _create_self_attention('sa_learned_content_hier_h16_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_quadratic_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """A small quadratic model to train on a CPU: 96 channels on 8 x 8 positions."""
    return _create_self_attention('sa_quadratic_tiny_cifar', pretrained, **dict(TINY, **kwargs))


@register_model
def sa_quadratic_gen_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """A small model with a full precision per head, to train on a CPU: 96 channels on 8 x 8 positions."""
    model_args = dict(TINY, encoding='quadratic_gen')
    return _create_self_attention('sa_quadratic_gen_tiny_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_quadratic_h16_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """`sa_quadratic_tiny_cifar` with 16 heads per layer."""
    model_args = dict(TINY, num_heads=16)
    return _create_self_attention('sa_quadratic_h16_tiny_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """A small model with learned positions only, to train on a CPU: 96 channels on 8 x 8 positions."""
    model_args = dict(TINY, encoding='learned')
    return _create_self_attention('sa_learned_tiny_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_h16_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """`sa_learned_tiny_cifar` with 16 heads per layer."""
    model_args = dict(TINY, encoding='learned', num_heads=16)
    return _create_self_attention('sa_learned_h16_tiny_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """A small model with content, to train on a CPU: 64 channels on 8 x 8 positions."""
    model_args = dict(TINY, embed_dim=64, mlp_dim=128, encoding='learned', terms=CONTENT)
    return _create_self_attention('sa_learned_content_tiny_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def sa_learned_content_hier_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> SelfAttentionNet:
    """A small hierarchical model with content, to train on a CPU: 64 channels on 8 x 8 positions."""
    model_args = dict(TINY, embed_dim=64, mlp_dim=128, **HIERARCHICAL)
    return _create_self_attention('sa_learned_content_hier_tiny_cifar', pretrained, **dict(model_args, **kwargs))
