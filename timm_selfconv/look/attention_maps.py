"""Attention maps: where every query of a net looks."""
import copy
from typing import Any, Callable, List, Optional, Tuple, Type, TypeVar, Union

import torch
import torch.nn as nn
from timm.layers import Attention, AttentionRope
from timm.models.convit import GPSA, MHSA
from timm.models.eva import EvaAttention
from timm.models.vision_transformer_relpos import RelPosAttention

from timm_selfconv.layers import GatedAttention, SanAttention2d, SelfAttention2d, TokenAttention
from timm_selfconv.layers.axis_scores import at_least_float32
from timm_selfconv.models import ResVit

__all__ = [
    'attention_maps', 'footprint_weights', 'has_footprints', 'layer_names', 'looks_at_content', 'position_gates',
    'private_copy',
]

T = TypeVar('T')
Kind = Union[Type[nn.Module], Tuple[Type[nn.Module], ...]]
# attention of tokens: `attn_drop` is given the probabilities, shape (B, heads, N, N), unless `fused_attn` is on
TOKEN_ATTENTION = (TokenAttention, Attention, AttentionRope, EvaAttention, RelPosAttention, MHSA, GPSA, GatedAttention)
# those that are a gated sum of content and position, of patches only: no prefix tokens have come yet
GATED_ATTENTION = (GPSA, GatedAttention)
PARTS = ('both', 'content', 'position')


def attention_layers(model: nn.Module) -> List[Any]:
    """The attention layers of a net that can be read, each once.

    Raises:
        ValueError: If there are none, or others besides, as a list with gaps would mislead.
    """
    layers = [m for m in model.modules() if isinstance(m, (SelfAttention2d, *TOKEN_ATTENTION))]
    unread = sorted({type(m).__name__ for m in model.modules() if hasattr(m, 'attn_drop') and m not in layers})
    if unread:
        raise ValueError(f'model={type(model).__name__}: the attention maps of its {", ".join(unread)} cannot be read')
    if not layers:
        raise ValueError(
            f"model={type(model).__name__}: has no attention maps to look into; needs SelfAttention2d layers or "
            "timm's vision transformer")
    return layers


def looks_at_content(model: nn.Module) -> bool:
    """Return True if a net's attention depends on the image, not on positions only.

    Raises:
        ValueError: If it has no attention that :func:`attention_maps` can read.
    """
    return any(
        m.terms != ('position',) if isinstance(m, SelfAttention2d) else True for m in attention_layers(model))


def position_gates(model: nn.Module) -> List[Optional[List[float]]]:
    """Share of attention by position, the rest by content, of each head in ConViT; None for layers without gates.

    Raises:
        ValueError: If the model has no attention that :func:`attention_maps` can read.
    """
    gates = [getattr(layer, 'gating_param', None) for layer in attention_layers(model)]
    return [None if gate is None else gate.float().sigmoid().tolist() for gate in gates]


def has_footprints(model: nn.Module) -> bool:
    """Return True if a net attends by vectors, whose weights :func:`footprint_weights` gives, instead of maps."""
    return any(isinstance(m, SanAttention2d) for m in model.modules())


def layer_names(model: nn.Module, layers: int) -> List[str]:
    """Names of the layers whose maps or footprints one sees, shared bottlenecks with the pass they are in."""
    blocks = [m for m in model.modules() if isinstance(m, SanAttention2d)]
    if not blocks:
        return [f'layer {i}' for i in range(layers)]
    if layers == len(blocks):
        return [f'bottleneck {i}' for i in range(layers)]
    return [f'pass {i // len(blocks)}, block {i % len(blocks)}' for i in range(layers)]


def private_copy(model: nn.Module) -> nn.Module:
    """A net that shares a net's parameters and buffers and is in eval mode.

    Modes, flags and hooks of its modules are its own: set there, other threads that run the net don't see them.
    """
    hooks = (hook for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for hook in d.values())
    memo = {id(shared): shared for shared in (*model.parameters(), *model.buffers(), *hooks)}
    return copy.deepcopy(model, memo).eval()


def look_into(model: nn.Module, kind: Kind, images: torch.Tensor, look: Callable[..., T]) -> List[T]:
    """Apply a function to each layer of a kind and to its inputs, in the order the layers run.

    The layers are those of a private copy; there are no gradients.
    """
    net = private_copy(model)
    seen: List[T] = []
    for layer in net.modules():
        if isinstance(layer, kind):
            layer.register_forward_pre_hook(lambda layer, args: seen.append(look(layer, *args)))
    with torch.no_grad():
        net(images)
    return seen


def patch_grid(model: Any, images: torch.Tensor) -> Tuple[int, Tuple[int, int]]:
    """Number of a transformer's prefix tokens, and its rows and columns of patches.

    Raises:
        ValueError: If it does not say so.
    """
    if isinstance(model, ResVit):
        return 1, model.grid_size
    try:
        return model.num_prefix_tokens, model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    except AttributeError as e:
        raise ValueError(f'model={type(model).__name__}: does not say how its tokens lie on a grid ({e})') from e


def among_patches(probs: torch.Tensor, prefix: int, grid: Tuple[int, int]) -> torch.Tensor:
    """Attention of patches to patches, scaled to sum to 1: shape (B, heads, H, W, H, W), at least float32.

    Probabilities are those of all tokens, shape (B, heads, N, N), query before key; ``prefix`` of them come before the
    H x W patches of the grid.

    Raises:
        ValueError: If N is not prefix + H W.
    """
    if probs.shape[-2:] != (prefix + grid[0] * grid[1],) * 2:
        raise ValueError(
            f'attention maps of shape {list(probs.shape)}: needs one of all tokens for each, {prefix} and then '
            f'{grid[0]} x {grid[1]} patches')
    probs = probs[..., prefix:, prefix:].to(torch.promote_types(probs.dtype, torch.float32))
    probs = probs / probs.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    return probs.unflatten(-1, grid).unflatten(-3, grid)


def part_maps(model: nn.Module, images: torch.Tensor, part: str) -> List[torch.Tensor]:
    """One part of all gated attention, see :func:`attention_maps`."""
    if not any(isinstance(layer, GATED_ATTENTION) for layer in attention_layers(model)):
        raise ValueError(f"part={part!r}: needs a net with gated attention (ConViT), or part='both'")
    _, grid = patch_grid(model, images)

    def look(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        content, position = GatedAttention(layer, grid).attention_parts(x)
        return among_patches(content if part == 'content' else position.expand(len(x), -1, -1, -1), 0, grid)
    return look_into(model, GATED_ATTENTION, images, look)


def attention_maps(model: nn.Module, images: torch.Tensor, part: str = 'both') -> List[torch.Tensor]:
    """Attention probabilities of every layer, in eval mode.

    They are the same whether the net runs through row and column factors, a fused kernel or the explicit map: those of
    :class:`SelfAttention2d` are computed beside the forward pass from what enters each layer, and transformers run
    through explicit maps. The net itself is left alone, so other threads may run or train it meanwhile.

    Of transformers these are the maps of patches only. Prefix tokens (class token, registers) are left out, as queries
    and as keys, and what is left is scaled to sum to 1: the softmax over patches only, without what a query gives to
    the prefix tokens.

    Args:
        model: Net with :class:`SelfAttention2d` layers, or a vision transformer: the zoo's ``resvit_*``, or timm's with
            its attention for tokens (normalised queries and keys, rotary and relative positions included), or timm's
            ConViT, fused or not.
        images: Images as the net takes them, shape (B, C, height, width).
        part: What to see of ConViT's gated attention: 'both' parts as their gates (:func:`position_gates`) sum them up,
            or the map of 'content' or of 'position' as it is before its gate, of gated layers only.

    Returns:
        One tensor per layer, in the order they run, shape (B, heads, H, W, H, W), query pixel first; each query's map
        sums to 1. Maps that don't depend on the image are expanded over the batch, not copied.

    Raises:
        ValueError: If the model has no such layers, or others besides, or a part is asked of a net without gates.
    """
    if part not in PARTS:
        raise ValueError(f'part={part!r}: needs one of {PARTS}')
    if part != 'both':
        return part_maps(model, images, part)

    def probs(layer: SelfAttention2d, *args: Optional[torch.Tensor]) -> torch.Tensor:
        # in float64, which some devices lack: a centre may be thousands of pixels away
        x, *key = (x.cpu().double() for x in args if x is not None)
        maps = copy.deepcopy(layer).cpu().double().attention_probs(x, *key)
        return maps.to(at_least_float32(images).dtype).to(images.device)

    if all(isinstance(layer, SelfAttention2d) for layer in attention_layers(model)):
        return look_into(model, SelfAttention2d, images, probs)
    net = private_copy(model)
    prefix, grid = patch_grid(net, images)
    maps: List[torch.Tensor] = []
    for layer in attention_layers(net):
        layer.fused_attn = False
        before = 0 if isinstance(layer, GATED_ATTENTION) else prefix
        layer.attn_drop.register_forward_pre_hook(
            lambda _, args, before=before: maps.append(among_patches(args[0], before, grid)))
    with torch.no_grad():
        net(images)
    return maps


def footprint_weights(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Weights of every vector attention, in eval mode: what stands for attention maps in a SAN.

    Args:
        model: Net with :class:`SanAttention2d` layers.
        images: Images as the net takes them, shape (B, C, height, width).

    Returns:
        One tensor per bottleneck, in the order they run, shape (B, maps, H, W, K, K): query pixel, then its footprint.
        Pairwise weights sum to 1 over the footprint; patchwise ones have any sign and sum.

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
