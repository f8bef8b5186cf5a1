"""Sparse convolutions that layers learned: the offsets that their heads attend to at every query.

A head that gives nearly all of its attention to one offset shifts the image, so a layer of such heads is a convolution
with a sparse kernel (the generalised CNN of the paper's conclusion). Beyond the border of the grid, the pixel at an
offset is the nearest one inside, as with padding mode 'replicate'.
"""
import copy
from dataclasses import dataclass, replace
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch
import torch.nn as nn
from timm.models._input import get_model_input_config

from timm_selfconv.layers import ConvAttention, SelfAttention2d
from timm_selfconv.layers.hooks import look_into
from .residual import conv_residual, grid_size, near_taps

__all__ = ['HeadOffset', 'LearnedKernel', 'learned_kernel', 'learned_kernels', 'untrained_copy']

Offset = Tuple[int, int]
T = TypeVar('T')


@dataclass(frozen=True)
class HeadOffset:
    """The offset that a head attends to most.

    Attributes:
        offset: (row, column) in pixels from the query.
        mean: Mean attention to the pixel at this offset over all queries and images, beyond the border to the nearest
            pixel inside. A shift keeps this share.
        least: Least attention to that pixel over all images and over the queries from which it is on the grid.
        in_every_image: True if this offset has the largest mean in every image.
    """
    offset: Offset
    mean: float
    least: float
    in_every_image: bool


@dataclass(frozen=True)
class LearnedKernel:
    """Taps of a layer: the offsets of its fixed heads.

    Attributes:
        heads: The most attended offset of each head.
        fixed: Numbers of the fixed heads. Their least attention to their offset is above a threshold.
        taps: The offsets of the fixed heads, each once: as many as heads if these are distinct.
        reach: Distance of the farthest tap in pixels, None without taps.
        residual: ``shared`` of :func:`conv_residual` to convolutions with these taps, None without taps.
        residual_3x3: ``shared`` of :func:`conv_residual` to 3 x 3 convolutions, None on smaller grids.
        untrained: Kernel of the net before training, with the residual to the taps of the trained net; None if unknown.
    """
    heads: List[HeadOffset]
    fixed: List[int]
    taps: List[Offset]
    reach: Optional[float]
    residual: Optional[float]
    residual_3x3: Optional[float]
    untrained: Optional['LearnedKernel'] = None


def most_attended(maps: torch.Tensor) -> List[HeadOffset]:
    """Find the most attended offset of each head, from maps of shape (images, heads, H, W, H, W)."""
    height, width = grid_size(maps)
    offsets = torch.cartesian_prod(torch.arange(1 - height, height), torch.arange(1 - width, width))
    rows = offsets.split(2 * width - 1)  # a row of offsets at a time, as all take much memory
    means = torch.cat([near_taps(maps, row)[0].mean((-3, -2)) for row in rows], -1)
    best, heads = means.mean(0).argmax(-1), []
    for head, number in enumerate(best.tolist()):
        (seen, on_grid), (row, col) = near_taps(maps[:, head], offsets[number, None]), offsets[number].tolist()
        everywhere = bool((means[:, head].argmax(-1) == number).all())
        heads.append(HeadOffset((row, col), float(seen.mean()), float(seen[:, on_grid].amin()), everywhere))
    return heads


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f'threshold={threshold!r}: needs a number from 0 to 1')


def learned_kernel(
        maps: torch.Tensor, threshold: float = 0.5, taps: Optional[Sequence[Offset]] = None,
) -> LearnedKernel:
    """Find the sparse kernel of a layer from its attention maps.

    Args:
        maps: Attention maps, shape (..., heads, H, W, H, W), query first; leading axes for images.
        threshold: Attention from 0 to 1 that a fixed head exceeds at every query.
        taps: Offsets for the residual, by default the taps of the layer.

    Raises:
        ValueError: If the maps have another shape, or the threshold is not from 0 to 1.
    """
    check_threshold(threshold)
    if maps.dim() < 5:
        raise ValueError(f'maps of shape {list(maps.shape)}: needs an axis of heads before the queries')
    heads = most_attended(maps[None].flatten(0, -6))
    fixed = [number for number, head in enumerate(heads) if head.least > threshold]
    own = sorted({heads[number].offset for number in fixed})
    taps = own if taps is None else taps
    return LearnedKernel(
        heads, fixed, own, max([(row ** 2 + col ** 2) ** 0.5 for row, col in own], default=None),
        conv_residual(maps, torch.tensor(taps)).shared if taps else None,
        conv_residual(maps, 3).shared if min(grid_size(maps)) >= 3 else None)


def look_at_layers(model: nn.Module, images: Optional[torch.Tensor], look: Callable[[torch.Tensor], T]) -> List[T]:
    """Apply a function to the maps of each layer, shape (B, heads, H, W, H, W), see :func:`learned_kernels`."""
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    if not layers:
        raise ValueError(f'model={type(model).__name__}: needs a net with SelfAttention2d layers')
    if images is None:
        if any(layer.terms != ('position',) for layer in layers) or not hasattr(model, 'pretrained_cfg'):
            raise ValueError('images: this net looks at content or has no image size of its own, so it needs some')
        images = next(model.parameters()).new_zeros(1, *get_model_input_config(model)['input_size'])
    return look_into(model, SelfAttention2d, images, lambda layer, *args: look(layer.attention_probs(*args)))


def untrained_copy(model: nn.Module) -> Optional[nn.Module]:
    """Copy a net and initialise it by ``init_weights`` with seed 0; None if the net cannot initialise its heads."""
    net = copy.deepcopy(model).cpu()
    init_weights: Any = getattr(net, 'init_weights', None)
    if init_weights is None or any(isinstance(m, ConvAttention) for m in net.modules()):
        return None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed other devices, for good
        init_weights()
    return net.to(next(model.parameters()).device)


def learned_kernels(
        model: nn.Module, images: Optional[torch.Tensor] = None, threshold: float = 0.5,
) -> List[LearnedKernel]:
    """Find the sparse kernel of each layer of a net, before and after training, in the order of execution.

    Args:
        model: A net with :class:`SelfAttention2d` layers; for maps of other nets see :func:`learned_kernel`.
        images: Input of the net, shape (B, C, height, width). Needed if the net looks at content, or was not made by
            timm. With content, fixed heads attend to the same offset in every image.
        threshold: Attention from 0 to 1 that a fixed head exceeds at every query.

    Raises:
        ValueError: If the net has no such layers, or needs images and gets none.
    """
    kernels = look_at_layers(model, images, lambda maps: learned_kernel(maps, threshold))
    before = untrained_copy(model)
    if before is None:
        return kernels
    taps = iter([kernel.taps for kernel in kernels])
    untrained = look_at_layers(before, images, lambda maps: learned_kernel(maps, threshold, next(taps)))
    return [replace(kernel, untrained=first) for kernel, first in zip(kernels, untrained)]
