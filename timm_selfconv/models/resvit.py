"""Vision transformer on the features of a ResNet's first stage.

'An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale', Dosovitskiy et al., ICLR 2021
- https://arxiv.org/abs/2010.11929
'[Re] On the Relationship between Self-Attention and Convolutional Layers', Varma T, Prabhu, 2021 (this net, and the
hierarchical one)

Heads are as wide as the layer, there is no norm at the end, and the classifier sees the mean of all tokens, class token
included. The class token is a patch of zeros, embedded like the others.
"""
from typing import TYPE_CHECKING, Any, Dict, Final, List, Optional, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import ClassifierHead, DropPath, Mlp, calculate_drop_path_rates, \
    register_notrace_function, resample_abs_pos_embed, trunc_normal_, use_fused_attn
from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models.resnet import BasicBlock

from ._base import ZooNet, build_cifar_model, cifar_cfg
from .self_attention import check_images, to_grid_size

__all__ = ['ResVit']


@torch.fx.wrap
@register_notrace_function
def check_grid(x: torch.Tensor, grid_size: Tuple[int, int]) -> torch.Tensor:
    """Return patches x, shape (B, C, H, W), or raise a ValueError if there are no positions for them."""
    if x.shape[2] != grid_size[0] or x.shape[3] != grid_size[1]:
        raise ValueError(
            f'{x.shape[2]} x {x.shape[3]} patches: the positions are learned for {grid_size[0]} x {grid_size[1]}; '
            f'create the model with another img_size or call set_input_size')
    return x


class Attention(nn.Module):
    """Self-attention of tokens, every head as wide as the layer, that can meet keys computed elsewhere."""
    fused_attn: Final[bool]

    def __init__(
            self,
            dim: int,
            num_heads: int,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device=None,
            dtype=None,
    ):
        """
        Args:
            dim: Channels of tokens and of every head.
            num_heads: Number of heads.
            attn_drop: Dropout rate of the attention probabilities.
            proj_drop: Dropout rate of the output.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.fused_attn = use_fused_attn()
        self.query = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.key = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.value = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, [self.num_heads, -1]).transpose(1, 2)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys of x, shape (B, N, dim): shape (B, heads, N, dim)."""
        return self._heads(self.key(x))

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend, to keys given or x's own (see :meth:`keys`); x and the result have shape (B, N, dim)."""
        if key is None:
            key = self.keys(x)
        query, value = self._heads(self.query(x)), self._heads(self.value(x))
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                query, key, value, dropout_p=self.attn_drop.p if self.training else 0.)
        else:
            attn = (query * self.scale) @ key.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ value
        x = self.proj(x.transpose(1, 2).flatten(2))
        return self.proj_drop(x)


class Block(nn.Module):
    """Attention, then an MLP, each of the normalised input and added to the input itself (pre-norm)."""

    def __init__(
            self,
            dim: int,
            mlp_dim: int,
            num_heads: int,
            drop: float = 0.,
            attn_drop: float = 0.,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.attn = Attention(dim, num_heads, attn_drop=attn_drop, proj_drop=drop, **dd)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0. else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, mlp_dim, drop=(0., drop), **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0. else nn.Identity()

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys that this block's attention has for tokens x, shape (B, N, dim)."""
        return self.attn.keys(self.norm1(x))

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), key))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


class ResVit(ZooNet):
    """Classifier of transformer blocks on patches of convolutional features."""
    if TYPE_CHECKING:
        blocks: Any  # nn.Sequential of Block, whose attributes it does not show

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
            device=None,
            dtype=None,
    ):
        """
        Args:
            img_size: Height and width of the images, in pixels, which the positions are made for.
            patch_size: Side of the patches, in pixels: the convolutional stem keeps the resolution.
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features alone.
            global_pool: Pooling over all positions, '' for none.
            stem_dim: Channels of the stem and its two residual blocks.
            embed_dim: Channels of the tokens and of every head.
            depth: Number of layers.
            num_heads: Heads of every layer.
            mlp_dim: Hidden channels of the MLPs.
            hierarchical: Let all layers share one block, and all its passes the keys of the first one's input: depth
                costs no parameters (the report's hierarchical attention).
            drop_rate: Dropout rate of hidden states, after attention and MLP.
            attn_drop_rate: Dropout rate of attention probabilities.
            drop_path_rate: Stochastic depth rate of the last layer, growing linearly from 0; of every pass of a shared
                block.

        Raises:
            ValueError: If an argument is out of range.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        for name, value in (('patch_size', patch_size), ('in_chans', in_chans), ('stem_dim', stem_dim),
                            ('embed_dim', embed_dim), ('depth', depth), ('num_heads', num_heads),
                            ('mlp_dim', mlp_dim)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f'{name}={value!r}: needs an integer of at least 1')

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = embed_dim
        self.patch_size = patch_size
        self.grid_size = to_grid_size(img_size, patch_size)
        self.output_fmt = 'NHWC'
        self.grad_checkpointing = False

        self.conv1 = nn.Conv2d(in_chans, stem_dim, 3, padding=1, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(stem_dim, **dd)
        self.act1 = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(*[BasicBlock(stem_dim, stem_dim, **dd) for _ in range(2)])
        self.patch_embed = nn.Conv2d(stem_dim, embed_dim, patch_size, patch_size, **dd)
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid_size[0] * self.grid_size[1], embed_dim, **dd))

        num_blocks = 1 if hierarchical else depth
        drop_path_rates: Any = [drop_path_rate] if hierarchical else calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(*[
            Block(embed_dim, mlp_dim, num_heads, drop_rate, attn_drop_rate, drop_path_rates[i], **dd)
            for i in range(num_blocks)
        ])
        self.passes = depth // num_blocks
        self.hierarchical = hierarchical
        self.feature_info = [
            dict(num_chs=embed_dim, reduction=patch_size, module=f'blocks.{i % num_blocks}') for i in range(depth)]
        self.head = ClassifierHead(embed_dim, num_classes, pool_type=global_pool, input_fmt=self.output_fmt, **dd)
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Initialise what is this module's own; its parts initialise themselves."""
        trunc_normal_(self.pos_embed, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {'pos_embed'}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        return dict(stem=r'^conv1|^bn1|^layer1|^patch_embed|^pos_embed', blocks=r'^blocks\.(\d+)')

    @torch.jit.ignore
    def set_input_size(self, img_size: Union[int, Tuple[int, int]]) -> None:
        """Take images of another (height, width): the positions are resampled.

        Raises:
            ValueError: If the size is no multiple of the patch size.
        """
        grid_size = to_grid_size(img_size, self.patch_size)
        with torch.no_grad():
            resampled = resample_abs_pos_embed(self.pos_embed, list(grid_size), list(self.grid_size))
        self.pos_embed = nn.Parameter(resampled, requires_grad=self.pos_embed.requires_grad)
        self.grid_size = grid_size
        update_model_input_size(self, img_size)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Class token and patches of images x, with their positions, shape (B, 1 + H W, C)."""
        x = check_images(x, self.in_chans, self.patch_size)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        class_token = self.patch_embed(torch.zeros_like(x[:, :, :self.patch_size, :self.patch_size]))
        x = check_grid(self.patch_embed(x), self.grid_size)
        return torch.cat([class_token.flatten(2), x.flatten(2)], dim=2).transpose(1, 2) + self.pos_embed

    def _shared_key(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Keys that all passes of a shared block meet: those of the first one's tokens x."""
        return self.blocks[0].keys(x) if self.hierarchical else None

    def _grid(self, x: torch.Tensor) -> torch.Tensor:
        """Patch tokens of x, shape (B, 1 + H W, C), on their grid, shape (B, H, W, C)."""
        return x[:, 1:].unflatten(1, self.grid_size)

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """Like :meth:`_grid`, with the class token spread over it: the mean of the grid is that of all tokens of x."""
        patches = x.shape[1] - 1
        return (self._grid(x) * patches + x[:, :1, None]) / (patches + 1)

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, List[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]]]:
        """Forward features and return the patch tokens behind the chosen layers.

        Args:
            x: Images, shape (B, C, H, W).
            indices: Last n layers if an int, all if None, else those of these indices.
            norm: There is no norm at the end to apply.
            stop_early: Stop after the last layer asked for.
            output_fmt: 'NCHW' or 'NHWC'.
            intermediates_only: Leave the final features out.

        Returns:
            The intermediates, or the final features (NHWC) and the intermediates.
        """
        assert output_fmt in ('NCHW', 'NHWC'), 'Output format must be one of NCHW or NHWC.'
        intermediates: List[torch.Tensor] = []
        take_indices, max_index = feature_take_indices(len(self.blocks) * self.passes, indices)

        x = self._tokens(x)
        key = self._shared_key(x)
        i = 0
        for block in self.blocks:
            for _ in range(self.passes):
                if i <= max_index or not stop_early:
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        x = checkpoint(block, x, key)
                    else:
                        x = block(x, key)
                    if i in take_indices:
                        grid = self._grid(x)
                        intermediates.append(grid.permute(0, 3, 1, 2) if output_fmt == 'NCHW' else grid)
                i += 1

        if intermediates_only:
            return intermediates
        return self._spread(x), intermediates

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Drop the layers behind the last one asked for, and the head; the indices are returned resolved."""
        take_indices, max_index = feature_take_indices(len(self.blocks) * self.passes, indices)
        if self.hierarchical:
            self.passes = max_index + 1
        else:
            self.blocks = self.blocks[:max_index + 1]
        if prune_head:
            self.reset_classifier(0, '')
        return take_indices

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Features of images x, shape (B, C, H, W): shape (B, H / 2, W / 2, C), the class token spread over them."""
        x = self._tokens(x)
        key = self._shared_key(x)
        for block in self.blocks:
            for _ in range(self.passes):
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(block, x, key)
                else:
                    x = block(x, key)
        return self._spread(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: ResVit) -> Dict[str, torch.Tensor]:
    """Fit a checkpoint to a net: unwrap it, resample the positions of another (square) image size."""
    for key in ('state_dict', 'model'):
        state_dict = state_dict.get(key, state_dict)
    out = dict(state_dict)
    if 'pos_embed' in out and out['pos_embed'].shape[1] != model.pos_embed.shape[1]:
        out['pos_embed'] = resample_abs_pos_embed(out['pos_embed'], list(model.grid_size))
    return out


def _cfg(name: str, **kwargs: Any) -> Dict[str, Any]:
    return cifar_cfg(
        name,
        pool_size=(16, 16),
        first_conv='conv1', classifier='head.fc',
        paper_ids='arXiv:2010.11929',
        paper_name='An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale',
        **kwargs,
    )


default_cfgs = generate_default_cfgs({
    'resvit_cifar.cifar10': _cfg('resvit_cifar'),
    'resvit_hier_cifar.cifar10': _cfg('resvit_hier_cifar'),
})


def _create_resvit(variant: str, pretrained: bool = False, **kwargs: Any) -> ResVit:
    out_indices = kwargs.pop('out_indices', tuple(range(kwargs.get('depth', 6))))
    return build_cifar_model(
        ResVit, variant, pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **kwargs,
    )


@register_model
def resvit_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """Six blocks on a ResNet's first stage (37.4M parameters, 84.3 % published by the report)."""
    return _create_resvit('resvit_cifar', pretrained, **kwargs)


@register_model
def resvit_hier_cifar(pretrained: bool = False, **kwargs: Any) -> ResVit:
    """Six passes of one block on a ResNet's first stage (6.53M parameters, 87.7 % published by the report)."""
    model_args = dict(hierarchical=True)
    return _create_resvit('resvit_hier_cifar', pretrained, **dict(model_args, **kwargs))
