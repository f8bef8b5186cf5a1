"""Attention maps of nets, footprint weights, and attention of class tokens."""
import copy
from typing import Any, Callable, List, Optional, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.cait import ClassAttn

from timm_selfconv.layers import ConvAttention, SanAttention2d, SelfAttention2d, gaussian_axis_scores
from timm_selfconv.layers.functional import at_least_float32
from timm_selfconv.layers.hooks import look_into
from timm_selfconv.models import ResVit
from .transformers import TRANSFORMER_ATTENTION, LayerProbs, read_probs

__all__ = [
    'attention_maps', 'class_attention', 'footprint_weights', 'has_class_token', 'has_footprints', 'layer_names',
    'looks_at_content', 'position_gates',
]

T = TypeVar('T')
OWN_MAPS = (SelfAttention2d, ConvAttention)  # their maps are computed from the layer's input


def attends(module: nn.Module) -> bool:
    name = type(module).__name__
    return 'Pool' not in name and not isinstance(module, SanAttention2d) and not hasattr(module, 'num_classes') and (
        any(hasattr(module, given) for given in ('attn_drop', 'qkv', 'key_dim'))
        or (hasattr(module, 'num_heads') and 'Att' in name))


def attention_layers(model: nn.Module) -> List[Any]:
    """Attention layers of patches; a ValueError if there are none, or if the net has others that cannot be read."""
    layers = [m for m in model.modules() if isinstance(m, TRANSFORMER_ATTENTION)] or [
        m for m in model.modules() if isinstance(m, OWN_MAPS) and len(getattr(m, 'kernel_size', (1, 1))) == 2]
    read = {*layers, *(m for m in model.modules() if isinstance(m, ClassAttn))}
    unread = sorted({type(m).__name__ for m in model.modules() if m not in read and attends(m)})
    name = getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__
    if unread:
        raise ValueError(f'model={name}: the attention maps of its {", ".join(unread)} cannot be read')
    if not layers:
        raise ValueError(
            f"model={name}: has no attention maps; needs SelfAttention2d or ConvAttention "
            "layers, or one of timm's transformers")
    return layers


def looks_at_content(model: nn.Module) -> bool:
    """Return True if a net's attention depends on the image; raise a ValueError if it cannot be read."""
    return any(
        not isinstance(m, ConvAttention) and getattr(m, 'terms', None) != ('position',)
        for m in attention_layers(model))


def has_class_token(model: nn.Module) -> bool:
    """Return True if a transformer has a class token."""
    return isinstance(model, ResVit) or bool(
        getattr(model, 'has_class_token', getattr(model, 'cls_token', None) is not None))


def position_gates(model: nn.Module) -> List[Optional[List[float]]]:
    """Gates of ConViT: the share of attention by position for each head; None for layers without gates."""
    gates = [getattr(layer, 'gating_param', None) for layer in attention_layers(model)]
    return [None if gate is None else gate.float().sigmoid().tolist() for gate in gates]


def has_footprints(model: nn.Module) -> bool:
    """Return True if a net has vector attention, see :func:`footprint_weights`."""
    return any(isinstance(m, SanAttention2d) for m in model.modules())


def layer_names(model: nn.Module, layers: int) -> List[str]:
    """Names of the layers with maps or footprints; a shared bottleneck also has its pass.

    For convolutions converted to attention these are module names, unless one runs twice.
    """
    blocks = sum(isinstance(m, SanAttention2d) for m in model.modules())
    if blocks:
        name = 'bottleneck {0}' if layers == blocks else 'pass {1}, block {2}'
        return [name.format(i, *divmod(i, blocks)) for i in range(layers)]
    convs = [name for name, m in model.named_modules() if isinstance(m, ConvAttention) and name]
    return convs if len(convs) == layers else [f'layer {i}' for i in range(layers)]


def conv_maps(layer: ConvAttention, x: torch.Tensor) -> torch.Tensor:
    """Maps of :class:`ConvAttention` over the pixels of its input, shape (B, heads, H, W, H, W)."""
    zeros = layer.padding_mode == 'zeros'
    mode, widths = ('constant', [0] * 4) if zeros else (layer.padding_mode, layer.pad_widths)
    factors = []
    for center, n, before, after in zip(layer.centers.T, x.shape[2:], widths[-2::-2], widths[::-2]):
        pixels = torch.arange(n, dtype=x.dtype)
        keys = F.pad(pixels[None, None], (before, after), mode)[0, 0].long()
        scores = gaussian_axis_scores(center, layer.spreads.square(), len(keys), before + pixels)
        factors.append(scores.softmax(-1) @ F.one_hot(keys, n).to(x))  # adds up a pixel and its copies in the padding
    rows, cols = factors
    return (rows[:, :, None, :, None] * cols[:, None, :, None, :]).expand(len(x), -1, -1, -1, -1, -1)


def layer_maps(layer: Any, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
    # in float64, which some devices lack: a centre may be thousands of pixels away
    layer, args = copy.deepcopy(layer).cpu().double(), [given.cpu().double() for given in (x, key) if given is not None]
    maps = conv_maps(layer, *args) if isinstance(layer, ConvAttention) else layer.attention_probs(*args)
    return maps.to(at_least_float32(x).dtype).to(x.device)


def look_at_maps(
        model: nn.Module, images: torch.Tensor, own: Callable[[torch.Tensor], T], other: Callable[[LayerProbs], T],
) -> List[T]:
    if isinstance(attention_layers(model)[0], OWN_MAPS):
        return look_into(model, OWN_MAPS, images, lambda layer, *args: own(layer_maps(layer, *args)))
    return read_probs(model, images, other)


def attention_maps(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Attention probabilities of every layer, in eval mode.

    The formula that the net uses (factors, maps or scores) does not change the result. The net is not changed, so
    other threads may run or train it.

    Maps of transformers leave out prefix tokens (class token, registers); the rest is scaled to sum to 1. Windowed
    attention (Swin) has each window at its place and 0 elsewhere: 3 heads on 56 x 56 patches take 118 MB per image.
    Maps of converted convolutions leave out zero padding. They have a query at every pixel, although a strided layer
    uses only some.

    Args:
        model: Net with :class:`SelfAttention2d` or :class:`ConvAttention` layers, or a transformer: the zoo's
            ``resvit_*``, or a timm transformer from the list in the README of this folder.
        images: Preprocessed images, shape (B, C, height, width).

    Returns:
        One tensor per layer, in forward order, shape (B, heads, H, W, H, W), query before key; each query's map sums to
        1. Maps that do not depend on the image are expanded over the batch, not copied.

    Raises:
        ValueError: If the net has no such layers, or has others too.
    """
    return look_at_maps(model, images, lambda maps: maps, LayerProbs.maps)


def look_at_windows(model: nn.Module, images: torch.Tensor, look: Callable[[torch.Tensor], T]) -> List[T]:
    return look_at_maps(model, images, lambda maps: look(maps[:, None]), lambda probs: look(probs.window_maps()))


def class_attention(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Attention of the class token in every layer that has it, in eval mode.

    Args:
        model: Transformer with a class token that :func:`attention_maps` can read.
        images: Preprocessed images, shape (B, C, height, width).

    Returns:
        Attention to patches, without prefix tokens, scaled to sum to 1: one tensor per layer, in forward order, shape
        (B, heads, H, W). CaiT has a class token in its last layers only.

    Raises:
        ValueError: If the model has no class token, or its attention cannot be read.
    """
    if not has_class_token(model):
        raise ValueError(f'model={type(model).__name__}: has no class token')
    attention_layers(model)  # raises if it cannot be read
    maps = read_probs(model, images, LayerProbs.class_maps, class_layers=True)
    return [m for m in maps if m is not None]


def footprint_weights(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Weights of every vector attention layer (SAN), in eval mode.

    Args:
        model: Net with :class:`SanAttention2d` layers.
        images: Preprocessed images, shape (B, C, height, width).

    Returns:
        One tensor per bottleneck, in forward order, shape (B, maps, H, W, K, K): query pixel, then its footprint.
        Pairwise weights sum to 1 over the footprint; patchwise weights have any sign and sum.

    Raises:
        ValueError: If the model has no such layers.
    """
    def weights(layer: SanAttention2d, x: torch.Tensor, key: Optional[torch.Tensor], pass_index: int) -> torch.Tensor:
        query, _, own_key = layer.qvk(x).split([layer.query_dim, layer.value_dim, layer.query_dim], dim=1)
        footprint = layer.weights(query, own_key if key is None else key, pass_index)
        return footprint.permute(0, 2, 3, 4, 1).unflatten(-1, (layer.kernel_size, layer.kernel_size))

    if not has_footprints(model):
        raise ValueError(f'model={type(model).__name__}: has no SanAttention2d layers to look into')
    return look_into(model, SanAttention2d, images, weights)
