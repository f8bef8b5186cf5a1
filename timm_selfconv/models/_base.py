"""Base classes: timm's classifier interface, and a net of blocks of one width."""
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn

from timm.layers import ClassifierHead, DropPath, Format, LayerType, Mlp, get_act_layer, get_device_dtype, nchw_to, \
    nhwc_to, to_2tuple
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size

from timm_selfconv.layers import no_weight_decay
from timm_selfconv.layers.functional import image_chunks, traced
from timm_selfconv.layers.hooks import hooked
from timm_selfconv.layers.parameters import check_sizes

__all__ = ['Block', 'BlockNet', 'ZooNet', 'check_images', 'to_grid_size']


def to_grid_size(img_size: Union[int, Sequence[int]], patch_size: int) -> Tuple[int, int]:
    """Return rows and columns of patches, or raise a ValueError if patches do not fill the image."""
    size = to_2tuple(img_size)
    if len(size) != 2 or any(not isinstance(s, int) or s < patch_size or s % patch_size for s in size):
        raise ValueError(f'img_size={img_size!r}: needs a height and a width that are multiples of {patch_size}')
    return size[0] // patch_size, size[1] // patch_size


@torch.fx.wrap
def check_images(x: torch.Tensor, in_chans: int, min_size: int, multiple: int = 1) -> torch.Tensor:
    """Return images x, shape (B, C, H, W), or raise a ValueError if their shape is wrong. fx does not trace this."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f'x of shape {list(x.shape)}: needs images of shape (batch, {in_chans}, height, width)')
    height, width = x.shape[2], x.shape[3]
    if min(height, width) < min_size or height % multiple != 0 or width % multiple != 0:
        accepted = f'of at least {min_size}' if multiple == 1 else f'that are multiples of {multiple}'
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width {accepted}')
    return x


class ZooNet(nn.Module):
    """timm's classifier interface.

    A subclass defines ``head``, ``layers`` (the attribute that lists its layers) and :meth:`pass_layers`. If its layers
    do not return a grid of pixels, it also defines :meth:`to_grid` and :meth:`to_features`.
    """
    layers = 'stages'
    output_fmt = 'NCHW'

    def __init__(
            self,
            in_chans: int,
            num_classes: int,
            num_features: int,
            depth: int,
            min_size: int,
            size_multiple: int = 1,
    ):
        super().__init__()
        check_sizes(in_chans=in_chans, depth=depth)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = num_features
        self.depth = depth
        self.min_size = min_size
        self.size_multiple = size_multiple
        self.grad_checkpointing = False
        self.head: ClassifierHead

    @property
    def global_pool(self) -> str:
        return self.head.global_pool.pool_type

    def no_weight_decay(self) -> Set[str]:
        return no_weight_decay(self)

    def init_weights(self) -> None:
        """Call ``reset_parameters`` of every module: torch's defaults, as in the released code."""
        for module in self.modules():
            reset_parameters = getattr(module, 'reset_parameters', None)
            if reset_parameters is not None:
                reset_parameters()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))

    def prune_intermediate_layers(
            self, indices: Union[int, List[int]] = 1, prune_norm: bool = False, prune_head: bool = True) -> List[int]:
        """Drop the layers after the last index, and the head; return non-negative indices."""
        take_indices, max_index = feature_take_indices(self.depth, indices)
        self.depth = max_index + 1
        setattr(self, self.layers, getattr(self, self.layers)[:self.depth])
        if prune_head:
            self.reset_classifier(0, '')
        return take_indices

    def pass_layers(self, x: torch.Tensor, take: List[int], stop: int) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Pass images x, shape (B, C, H, W), through the first ``stop`` layers.

        Returns:
            The last output, and the outputs of the layers with indices in ``take``.
        """
        raise NotImplementedError

    def image_elements(self, height: int, width: int) -> int:
        """Elements of the largest intermediate tensor per image; 0 disables chunks."""
        return 0

    @torch.jit.unused
    def chunks(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split images into chunks that fit the cache, unless the net is trained, traced or hooked."""
        elements = 0 if traced(x) else self.image_elements(x.shape[2], x.shape[3])
        chunks = image_chunks(x, elements) if elements else [x]
        whole = len(chunks) > 1 and any(module.training or hooked(module) for module in self.modules())
        return [x] if whole else chunks

    def forward_layers(self, x: torch.Tensor, take: List[int], stop: int) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Run :meth:`pass_layers` chunk by chunk."""
        x = check_images(x, self.in_chans, self.min_size, self.size_multiple)
        if torch.jit.is_scripting():
            return self.pass_layers(x, take, stop)
        passed = [self.pass_layers(chunk, take, stop) for chunk in self.chunks(x)]
        if len(passed) == 1:
            return passed[0]
        taken = [torch.cat(layer) for layer in zip(*(layers for _, layers in passed))]
        return torch.cat([out for out, _ in passed]), taken

    def to_grid(self, x: torch.Tensor) -> torch.Tensor:
        """Convert a layer's output to a grid of pixels, in ``output_fmt``."""
        return x

    def to_features(self, x: torch.Tensor) -> torch.Tensor:
        """Convert the last layer's output to features for the head, in ``output_fmt``."""
        return x

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, List[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]]]:
        """Return final features and feature maps of images x, shape (B, C, H, W); arguments as in timm.

        ``norm`` has no effect, because there is no final norm. ``output_fmt`` applies to the intermediate maps only.
        """
        assert output_fmt in ('NCHW', 'NHWC'), 'Output format must be one of NCHW or NHWC.'
        take_indices, max_index = feature_take_indices(self.depth, indices)
        x, taken = self.forward_layers(x, take_indices, max_index + 1 if stop_early else self.depth)
        to_format = nchw_to if self.output_fmt == 'NCHW' else nhwc_to
        intermediates = [to_format(self.to_grid(t), Format(output_fmt)) for t in taken]
        if intermediates_only:
            return intermediates
        return self.to_features(x), intermediates

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of images x, shape (B, C, height, width), in ``output_fmt``."""
        x, _ = self.forward_layers(x, [], self.depth)
        return self.to_features(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


class Block(nn.Module):
    """Transformer block with residual connections, post-norm or pre-norm."""

    def __init__(
            self,
            attn: nn.Module,
            dim: int,
            mlp_dim: int,
            drop: float = 0.,
            drop_path: float = 0.,
            act_layer: LayerType = 'gelu',
            norm_eps: float = 1e-5,
            pre_norm: bool = False,
            device: Any = None,
            dtype: Any = None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.pre_norm = pre_norm
        self.attn: Any = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0. else nn.Identity()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, **dd)
        self.mlp = Mlp(dim, mlp_dim, act_layer=get_act_layer(act_layer), drop=(0., drop), **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0. else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, **dd)

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None, only_keys: bool = False) -> torch.Tensor:
        """Return the output for x, shape (B, ..., dim), or only the keys of x. ``key`` replaces the keys of x."""
        if only_keys:
            return self.attn.keys(self.norm1(x) if self.pre_norm else x)
        if self.pre_norm:
            x = x + self.drop_path1(self.attn(self.norm1(x), key))
            return x + self.drop_path2(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop_path1(self.attn(x, key)))
        return self.norm2(x + self.drop_path2(self.mlp(x)))


class BlockNet(ZooNet):
    """Classifier of transformer blocks on patches. A subclass defines ``blocks``, ``head`` and :meth:`embed`.

    A hierarchical net repeats one block. All passes attend to the same keys, computed once from the first input.
    """
    layers = 'blocks'
    output_fmt = 'NHWC'
    __constants__ = ('shares_key',)  # not Final: torchscript reads the annotations of the net's own class only

    def __init__(
            self,
            patch_size: int,
            in_chans: int,
            num_classes: int,
            embed_dim: int,
            depth: int,
            hierarchical: bool,
    ):
        super().__init__(in_chans, num_classes, embed_dim, depth, min_size=patch_size, size_multiple=patch_size)
        check_sizes(patch_size=patch_size, embed_dim=embed_dim)
        self.patch_size = patch_size
        self.blocks: Any  # nn.Sequential: mypy does not know the arguments of its blocks
        self.shares_key = hierarchical
        self.feature_info = [
            dict(num_chs=embed_dim, reduction=patch_size, module=f'blocks.{0 if hierarchical else layer}')
            for layer in range(depth)]

    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        return dict(stem=r'^(?!blocks\.|head\.)', blocks=r'^blocks\.(\d+)')

    def set_input_size(self, img_size: Union[int, Tuple[int, int]]) -> None:
        """Set the image size (height, width) and resample learned positions."""
        grid_size = to_grid_size(img_size, self.patch_size)
        for module in self.modules():
            set_grid_size = getattr(module, 'set_grid_size', None)
            if set_grid_size is not None:
                set_grid_size(grid_size)
        update_model_input_size(self, img_size)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Embed images x, shape (B, C, H, W): the input of the first block."""
        raise NotImplementedError

    def pass_layers(self, x: torch.Tensor, take: List[int], stop: int) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        x = self.embed(x)
        key: Optional[torch.Tensor] = None
        if self.shares_key:
            key = self.blocks[0](x, only_keys=True)
        taken: List[torch.Tensor] = []
        layer = 0
        for block in self.blocks:
            for _ in range(self.depth // len(self.blocks)):
                if layer < stop:
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        x = checkpoint(block, x, key)
                    else:
                        x = block(x, key)
                    if layer in take:
                        taken.append(x)
                layer += 1
        return x, taken
