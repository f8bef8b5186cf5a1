"""Self-attention networks with a weight per channel over a small footprint.

'Exploring Self-attention for Image Recognition', Zhao, Jia, Koltun, CVPR 2020
- https://arxiv.org/abs/2004.13621
'[Re] On the Relationship between Self-Attention and Convolutional Layers', Varma T, Prabhu, 2021 (these sizes, and the
hierarchical nets)

The plain nets are SAN10 without its last stage, with 3 x 3 footprints. The hierarchical nets repeat one pair of
bottlenecks four times at full resolution. All passes use the keys of the first bottleneck in the first pass. The second
bottleneck has an unused key projection, because the published parameter count includes it.
"""
import contextlib
import functools
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import ClassifierHead, to_2tuple
from timm.models import checkpoint, generate_default_cfgs, register_model

from timm_selfconv.layers import PassBatchNorm2d, SanAttention2d
from timm_selfconv.layers.san_attention import channels_last
from ._base import ZooNet
from ._cfg import build_net, cifar_cfgs

__all__ = ['SAN']


@contextlib.contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged while a batch is recomputed."""
    norms: List[Any] = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    states = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0., torch.zeros_like(norm.num_batches_tracked)
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, states):
            norm.momentum, norm.num_batches_tracked = momentum, batches


class Bottleneck(nn.Module):
    """BN, ReLU, attention with a quarter of the channels, BN, ReLU, 1x1 convolution, residual.

    A shared bottleneck runs several times and returns its keys. Its queries, keys and values have no bias.
    """

    def __init__(
            self, dim: int, kind: str, shared: bool = False, passes: int = 1, device: Any = None, dtype: Any = None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.shared = shared
        self.norm1 = PassBatchNorm2d(dim, passes, **dd)
        self.attn = SanAttention2d(dim, kind, qkv_bias=not shared, passes=passes, **dd)
        self.norm2 = PassBatchNorm2d(dim // 4, passes, **dd)
        self.conv = nn.Conv2d(dim // 4, dim, 1, **dd)

    def forward(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            pass_index: int = 0,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return the output, and the keys of a shared bottleneck."""
        shortcut = x
        x = F.relu(self.norm1(x, pass_index), inplace=True)
        if self.shared and key is None:
            key = self.attn.keys(x)
        x = self.attn(x, key, pass_index)
        x = self.conv(F.relu(self.norm2(x, pass_index), inplace=True))
        x += shortcut  # in place is faster on a CPU
        return x, key


class Stage(nn.Module):
    """Max-pooling (optional), 1x1 convolution, bottlenecks, BN and ReLU."""

    def __init__(self, in_chs: int, dim: int, depth: int, kind: str, pool: bool, device: Any = None, dtype: Any = None):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.conv = nn.Conv2d(in_chs, dim, 1, bias=False, **dd)
        self.blocks = nn.ModuleList([Bottleneck(dim, kind, **dd) for _ in range(depth)])
        self.norm = nn.BatchNorm2d(dim, **dd)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, begin: bool = True, end: bool = True) -> torch.Tensor:
        """Run the stage, or only its part before or after the shared bottlenecks."""
        if begin:
            x = self.conv(self.pool(x))
            for block in self.blocks:
                x, _ = block(x)
        if end:
            x = self.act(self.norm(x))
        return x


class SAN(ZooNet):
    """Classifier of stages of vector attention."""

    def __init__(
            self,
            in_chans: int = 3,
            num_classes: int = 10,
            global_pool: str = 'avg',
            kind: str = 'pairwise',
            channels: Sequence[int] = (64, 256, 512, 1024),
            depths: Sequence[int] = (2, 1, 2, 4),
            hierarchical: bool = False,
            img_size: Union[int, Tuple[int, int], None] = None,
            drop_rate: float = 0.,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features only.
            global_pool: Pooling over all positions, '' for none.
            kind: 'pairwise' or 'patchwise' attention, see :class:`SanAttention2d`.
            channels: Channels of each stage, multiples of 32.
            depths: Bottlenecks of each stage.
            hierarchical: Share bottlenecks and the first keys between all stages, at full resolution. Channels and
                depths must be equal in all stages.
            img_size: Height and width of the images, in pixels; only checked against the smallest size.
            drop_rate: Dropout rate before the classifier.

        Raises:
            ValueError: If an argument is out of range.
        """
        dd = {'device': device, 'dtype': dtype}
        channels, depths = tuple(channels), tuple(depths)
        if not channels or len(channels) != len(depths):
            raise ValueError(f'channels={channels!r} and depths={depths!r}: need one number per stage each')
        if any(not isinstance(depth, int) or depth < 1 for depth in depths):
            raise ValueError(f'depths={depths!r}: needs integers of at least 1')
        if hierarchical and len(set(zip(channels, depths))) > 1:
            raise ValueError(
                f'channels={channels!r}, depths={depths!r}: need equal numbers if stages share bottlenecks')
        min_size = 2 if hierarchical else 2 * 2 ** len(channels)  # reflection padding needs 2 pixels
        if img_size is not None and min(to_2tuple(img_size)) < min_size:
            raise ValueError(f'img_size={img_size!r}: needs a height and width of at least {min_size}')

        super().__init__(in_chans, num_classes, channels[-1], len(channels), min_size)
        self.hierarchical = hierarchical

        self.stem = nn.Conv2d(in_chans, channels[0], 1, bias=False, **dd)
        self.stem_norm = nn.BatchNorm2d(channels[0], **dd)
        self.stem_act = nn.ReLU(inplace=True)
        self.stem_pool = nn.Identity() if hierarchical else nn.MaxPool2d(2)
        self.stages: Any = nn.ModuleList([  # mypy does not know the attributes of its stages
            Stage(in_chs, dim, 0 if hierarchical else depth, kind, pool=not hierarchical and i > 0, **dd)
            for i, (in_chs, dim, depth) in enumerate(zip(channels[:1] + channels, channels, depths))
        ])
        self.shared_blocks = nn.ModuleList([
            Bottleneck(channels[0], kind, shared=True, passes=len(channels), **dd)
            for _ in range(depths[0] if hierarchical else 0)
        ])
        self.feature_info = [
            dict(num_chs=dim, reduction=1 if hierarchical else 2 ** (i + 1), module=f'stages.{i}')
            for i, dim in enumerate(channels)
        ]
        self.head = ClassifierHead(channels[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd)

    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        return dict(stem=r'^stem', blocks=[
            (r'^shared_blocks', (0,)),
            (r'^stages\.(\d+)' if coarse else r'^stages\.(\d+)\.blocks\.(\d+)', None),
            (r'^stages\.(\d+)\.(?:conv)', (0,)),
            (r'^stages\.(\d+)\.(?:norm)', (99999,)),
        ])

    def image_elements(self, height: int, width: int) -> int:
        return self.stem_norm.num_features * height * width

    def _pass_stage(
            self,
            number: int,
            x: torch.Tensor,
            key: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        for i, stage in enumerate(self.stages):  # torchscript cannot index modules
            if i == number:
                x = stage(x, end=not self.hierarchical)
                for block in self.shared_blocks:
                    x, key = block(x, key, number)
                if self.hierarchical:
                    x = stage(x, begin=False)
        return x, key

    @torch.jit.unused
    def _recompute_stage(self, *args: Any) -> Any:
        if not self.training or torch.compiler.is_compiling():  # a compiler chooses the results to recompute
            return self._pass_stage(*args)
        return checkpoint(
            self._pass_stage, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), frozen_statistics(self)))

    def pass_layers(self, x: torch.Tensor, take: List[int], stop: int) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        # ReLU commutes with max-pooling, and is cheaper after it
        x = self.stem_act(self.stem_pool(self.stem_norm(self.stem(channels_last(x)))))
        key: Optional[torch.Tensor] = None
        taken: List[torch.Tensor] = []
        for i in range(stop):
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x, key = self._recompute_stage(i, x, key)
            else:
                x, key = self._pass_stage(i, x, key)
            if i in take:
                taken.append(x)
        return x, taken


_cfgs = functools.partial(
    cifar_cfgs,
    first_conv='stem', classifier='head.fc',
    paper_ids='arXiv:2004.13621', paper_name='Exploring Self-attention for Image Recognition',
    origin_url='https://github.com/hszhao/SAN',
)

default_cfgs = generate_default_cfgs({
    **_cfgs('san_pairwise_cifar', 'san_patchwise_cifar', pool_size=(2, 2)),
    **_cfgs('san_pairwise_hier_cifar', 'san_patchwise_hier_cifar', pool_size=(32, 32)),
})


_create_san = functools.partial(build_net, SAN)

HIERARCHICAL = dict(channels=(256,) * 4, depths=(2,) * 4, hierarchical=True)


@register_model
def san_pairwise_cifar(pretrained: bool = False, **kwargs: Any) -> SAN:
    """SAN10 without its last stage, pairwise (3.74M parameters, 81.8 % published by the report)."""
    model_args = dict(kind='pairwise')
    return _create_san('san_pairwise_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def san_patchwise_cifar(pretrained: bool = False, **kwargs: Any) -> SAN:
    """SAN10 without its last stage, patchwise (3.85M, 85.7 %; the published 3.74M are the pairwise net's)."""
    model_args = dict(kind='patchwise')
    return _create_san('san_patchwise_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def san_pairwise_hier_cifar(pretrained: bool = False, **kwargs: Any) -> SAN:
    """Four passes of one pair of pairwise bottlenecks (0.35M, 85.3 % published by the report)."""
    model_args = dict(HIERARCHICAL, kind='pairwise')
    return _create_san('san_pairwise_hier_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def san_patchwise_hier_cifar(pretrained: bool = False, **kwargs: Any) -> SAN:
    """Four passes of one pair of patchwise bottlenecks (0.36M, 91.2 % published by the report)."""
    model_args = dict(HIERARCHICAL, kind='patchwise')
    return _create_san('san_patchwise_hier_cifar', pretrained, **dict(model_args, **kwargs))
