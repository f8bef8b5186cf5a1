"""Vector self-attention over a footprint of pixels, pairwise and patchwise.

'Exploring Self-attention for Image Recognition', Zhao, Jia, Koltun, CVPR 2020
- https://arxiv.org/abs/2004.13621
"""
from typing import Any, Dict, Final, List, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_function, register_notrace_module

from .parameters import check_sizes

__all__ = [
    'PassBatchNorm2d', 'SanAttention2d', 'aggregate', 'channels_last', 'footprint', 'pairwise_relation',
    'patchwise_relation', 'pixel_coordinates',
]

KINDS = ('pairwise', 'patchwise')


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Convert x, shape (B, C, H, W), to channels-last memory."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap does not support memory formats


def footprint(x: torch.Tensor, kernel_size: int) -> List[torch.Tensor]:
    """Shift x, shape (B, C, H, W), to each offset of a footprint, row by row, with reflection at the border.

    Raises:
        ValueError: If the image is too small for reflection.
    """
    margin = kernel_size // 2
    height, width = x.shape[-2], x.shape[-1]
    if min(height, width) <= margin:
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width of at least {margin + 1}')
    if margin > 0:  # autocast pads in float32
        x = F.pad(x, (margin, margin, margin, margin), mode='reflect').to(x.dtype)
    views: List[torch.Tensor] = []
    for i in range(kernel_size):
        for j in range(kernel_size):
            views.append(x[..., i:i + height, j:j + width])
    return views


@torch.fx.wrap
@register_notrace_function
def pairwise_relation(
        query: torch.Tensor, key: torch.Tensor, place: torch.Tensor, kernel_size: int,
) -> torch.Tensor:
    """Return differences of queries and keys in a footprint, and of their position features.

    Queries and keys have shape (B, C, H, W), position features (1, P, H, W), and the differences
    (B, C + P, kernel_size ^ 2 H, W), with the offsets concatenated along the rows.
    """
    keys, places = footprint(key, kernel_size), footprint(place, kernel_size)
    pairs: List[torch.Tensor] = []
    for i in range(len(keys)):
        there = channels_last((place - places[i]).expand(key.shape[0], -1, -1, -1))
        pairs.append(torch.cat([query - keys[i], there], dim=1))
    return torch.cat(pairs, dim=2)


@torch.fx.wrap
@register_notrace_function
def patchwise_relation(query: torch.Tensor, key: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Concatenate each query with the keys of its footprint, as for :func:`pairwise_relation`.

    Returns:
        Query, then keys, offsets row by row, shape (B, C (1 + kernel_size ^ 2), H, W).
    """
    patch = [query]
    patch.extend(footprint(key, kernel_size))
    return torch.cat(patch, dim=1)


@torch.fx.wrap
@register_notrace_function
def aggregate(value: torch.Tensor, weights: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Sum the values in the footprint of each query, shape (B, C, H, W), with weights per channel.

    The weights have shape (B, kernel_size ^ 2, maps, H, W), offsets row by row. Channel j uses map ``j mod maps``.
    """
    # contiguous, so that the shifts of a footprint read whole rows
    weights = weights.to(value.dtype).contiguous()
    out = torch.zeros(0)
    for i, shifted in enumerate(footprint(value.contiguous(), kernel_size)):
        shifted = shifted.unflatten(1, [-1, weights.shape[2]])
        out = weights[:, i, None] * shifted if i == 0 else torch.addcmul(out, weights[:, i, None], shifted)
    return out.flatten(1, 2)


@torch.fx.wrap
@register_notrace_function
def pixel_coordinates(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Return row and column coordinates from -1 to 1, shape (1, 2, height, width)."""
    rows = torch.linspace(-1., 1., height, device=like.device, dtype=like.dtype)
    cols = torch.linspace(-1., 1., width, device=like.device, dtype=like.dtype)
    return torch.stack(torch.meshgrid([rows, cols], indexing='ij'))[None]


@register_notrace_module
class PassStatistics2d(nn.BatchNorm2d):
    """Batch normalisation for one pass. The caller gives scale and shift."""
    num_batches_tracked: torch.Tensor

    def forward(
            self,
            x: torch.Tensor,
            weight: Optional[torch.Tensor] = None,
            bias: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Normalise x as torch does, with given scale and shift, shape (C,) each."""
        momentum = self.momentum
        learns = self.training and self.track_running_stats
        if learns:
            self.num_batches_tracked.add_(1)
        if momentum is None:  # cumulative average
            momentum = 1. / float(self.num_batches_tracked) if learns else 0.
        known = learns or not self.training
        return F.batch_norm(
            x, self.running_mean if known else None, self.running_var if known else None, weight, bias, self.training,
            momentum, self.eps)


class PassBatchNorm2d(nn.Module):
    """Batch normalisation of a shared block, with one scale and shift, and running statistics per pass.

    Each pass has a different distribution. Its norm can be replaced by SyncBatchNorm or timm's frozen norm.
    """

    def __init__(self, num_features: int, passes: int = 1, device: Any = None, dtype: Any = None):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, **dd))
        self.bias = nn.Parameter(torch.empty(num_features, **dd))
        self.passes = nn.ModuleList([PassStatistics2d(num_features, affine=False, **dd) for _ in range(passes)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set scale to 1 and shift to 0. The norms of the passes reset their statistics."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load a state dict. In files of version 0.1 the statistics are one buffer, shape (passes, C)."""
        for name in ('running_mean', 'running_var'):
            statistics = state_dict.pop(prefix + name, ())
            state_dict.update((f'{prefix}passes.{i}.{name}', s) for i, s in enumerate(statistics))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: torch.Tensor, pass_index: int = 0) -> torch.Tensor:
        """Normalise x, shape (B, C, H, W), with the statistics of one pass."""
        if not 0 <= pass_index < len(self.passes):
            raise ValueError(f'pass_index={pass_index}: needs one of {len(self.passes)} passes, counted from 0')
        for i, norm in enumerate(self.passes):  # torchscript cannot index modules
            if i == pass_index:
                if not torch.jit.is_scripting() and isinstance(norm, PassStatistics2d):
                    x = norm(x, self.weight, self.bias)
                else:
                    scaled = torch.addcmul(self.bias[:, None, None], norm(x), self.weight[:, None, None])
                    x = scaled.to(x.dtype)
        return x


class SanAttention2d(nn.Module):
    """Attention with a weight per channel, from a small network. Eight channels share a weight.

    With j in the footprint R(i) of pixel i, and gamma the network BN, ReLU, linear, BN, ReLU, linear,

        pairwise:   y_i = sum_j softmax_j(gamma([q_i - k_j, p_i - p_j])) * v_j
        patchwise:  y_i = sum_j gamma([q_i, k_R(i)])_j * v_j

    where p are learned features of the pixel coordinates.
    """
    patchwise: Final[bool]

    def __init__(
            self,
            dim: int,
            kind: str = 'pairwise',
            kernel_size: int = 3,
            qkv_bias: bool = True,
            passes: int = 1,
            device: Any = None,
            dtype: Any = None,
    ):
        """
        Args:
            dim: Channels of the input, a multiple of 32. Queries and keys have dim / 16, values and output dim / 4.
            kind: 'pairwise' or 'patchwise'.
            kernel_size: Side of the footprint, odd.
            qkv_bias: Add a bias to queries, keys and values.
            passes: Number of passes through the layer; see :class:`PassBatchNorm2d`.

        Raises:
            ValueError: If an argument is out of range.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f'kind={kind!r}: needs one of {KINDS}')
        if not isinstance(dim, int) or dim < 32 or dim % 32:
            raise ValueError(f'dim={dim!r}: needs a multiple of 32')
        check_sizes(kernel_size=kernel_size, passes=passes)
        if kernel_size % 2 == 0:
            raise ValueError(f'kernel_size={kernel_size}: needs an odd number')
        self.patchwise = kind == 'patchwise'
        self.kernel_size = kernel_size
        self.query_dim = dim // 16
        self.value_dim = dim // 4
        self.num_maps = self.value_dim // 8
        offsets = kernel_size ** 2

        self.qvk = nn.Conv2d(dim, 2 * self.query_dim + self.value_dim, 1, bias=qkv_bias, **dd)
        if self.patchwise:
            widths = self.query_dim * (1 + offsets), self.num_maps, self.num_maps * offsets
        else:
            self.position = nn.Conv2d(2, 2, 1, **dd)
            widths = self.query_dim + 2, self.query_dim, self.num_maps
        self.norm1 = PassBatchNorm2d(widths[0], passes, **dd)
        self.weight1 = nn.Conv2d(widths[0], widths[1], 1, bias=False, **dd)
        self.norm2 = PassBatchNorm2d(widths[1], passes, **dd)
        self.weight2 = nn.Conv2d(widths[1], widths[2], 1, **dd)

    def weights(self, query: torch.Tensor, key: torch.Tensor, pass_index: int = 0) -> torch.Tensor:
        """Return weights, (B, kernel_size ^ 2, dim / 32, H, W), for queries and keys, (B, query_dim, H, W)."""
        if self.patchwise:
            x = patchwise_relation(query, key, self.kernel_size)
        else:
            place = self.position(pixel_coordinates(key.shape[2], key.shape[3], key))
            x = pairwise_relation(query, key, place.to(key.dtype), self.kernel_size)
        x = self.weight1(F.relu(self.norm1(x, pass_index), inplace=True))
        x = self.weight2(F.relu(self.norm2(x, pass_index), inplace=True))
        if self.patchwise:
            return x.unflatten(1, [-1, self.num_maps])
        return x.unflatten(2, [-1, key.shape[2]]).softmax(dim=2).transpose(1, 2)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return keys of x, shape (B, dim, H, W): shape (B, dim / 16, H, W)."""
        return self.qvk(x)[:, self.query_dim + self.value_dim:]

    def forward(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            pass_index: int = 0,
    ) -> torch.Tensor:
        """Map x, shape (B, dim, H, W), to shape (B, dim / 4, H, W), with the statistics of one pass.

        ``key`` replaces the keys of x, see :meth:`keys`.
        """
        query, value, own_key = self.qvk(x).split([self.query_dim, self.value_dim, self.query_dim], 1)
        weights = self.weights(query, own_key if key is None else key, pass_index)
        return channels_last(aggregate(value, weights, self.kernel_size))
