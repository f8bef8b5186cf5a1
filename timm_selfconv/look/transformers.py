"""Support for timm's transformers: attention layers, and the places of their tokens on the grid."""
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch
import torch.nn as nn
from timm.layers import Attention, AttentionRope, to_2tuple
from timm.models import beit, fastvit, gcvit, maxxvit, swin_transformer, swin_transformer_v2, swin_transformer_v2_cr, \
    vision_transformer_sam, visformer
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.convit import GPSA, MHSA
from timm.models.eva import EvaAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention

from timm_selfconv.layers import GatedAttention, TokenAttention
from timm_selfconv.layers.hooks import private_copy
from timm_selfconv.models import ResVit

__all__ = ['TRANSFORMER_ATTENTION', 'LayerProbs', 'read_probs']

T = TypeVar('T')
CHANNELS_FIRST = (visformer.Attention, fastvit.Attention, maxxvit.Attention2d)
# these pass probabilities of shape (B, heads, N, N) to `attn_drop` unless `fused_attn` is on
TRANSFORMER_ATTENTION: Any = (
    TokenAttention, Attention, AttentionRope, EvaAttention, RelPosAttention, beit.Attention, MHSA, GPSA, GatedAttention,
    ParallelScalingBlock, TalkingHeadAttn, *CHANNELS_FIRST, maxxvit.AttentionCl, vision_transformer_sam.Attention,
    swin_transformer.WindowAttention, swin_transformer_v2.WindowAttention,
    swin_transformer_v2_cr.WindowMultiHeadAttention, gcvit.WindowAttentionGlobal)
# blocks that split the grid into windows
WINDOW_BLOCKS = (
    swin_transformer.SwinTransformerBlock, swin_transformer_v2.SwinTransformerV2Block,
    swin_transformer_v2_cr.SwinTransformerV2CrBlock, gcvit.GlobalContextVitBlock, vision_transformer_sam.Block,
    maxxvit.PartitionAttentionCl, maxxvit.PartitionAttention2d)


def patch_grid(model: Any, images: torch.Tensor) -> Tuple[int, int]:
    if isinstance(model, ResVit):
        return model.grid_size
    embed = 'embeds' if isinstance(model, NaFlexVit) else 'patch_embed'
    try:
        return getattr(getattr(model, 'encoder', model), embed).dynamic_feat_size(tuple(images.shape[-2:]))
    except AttributeError as e:
        raise ValueError(f'model={type(model).__name__}: does not say how its tokens lie on a grid ({e})') from e


def scaled(probs: torch.Tensor) -> torch.Tensor:
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    return probs / probs.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)


@dataclass(frozen=True)
class LayerProbs:
    """Attention probabilities of a layer, and the places of its tokens.

    Attributes:
        probs: All tokens, query before key, shape (B, heads, N, N), or (B windows, heads, N, N), or the class token
            only, shape (B, heads, 1, N).
        grid: Rows H and columns W of the patches; patches come last, row by row.
        places: Place of each token of a window, row * W + column, -1 for padding, shape (windows, N); None without
            windows.
        window: Rows and columns of a window.
    """
    probs: torch.Tensor
    grid: Tuple[int, int]
    places: Optional[torch.Tensor] = None
    window: Tuple[int, int] = (1, 1)

    def maps(self) -> torch.Tensor:
        """Attention of patches to patches, scaled to sum to 1, zero beyond a window: shape (B, heads, H, W, H, W)."""
        size = self.grid[0] * self.grid[1]
        if self.places is None:
            probs = scaled(self.probs[..., -size:, -size:])
        else:
            parts = self.probs.unflatten(0, (-1, len(self.places)))
            probs = parts.new_zeros(len(parts), parts.shape[2], size, size, dtype=scaled(parts[:0]).dtype)
            for part, place in zip(parts.unbind(1), self.places):
                on, tokens = place[place >= 0], (place >= 0).nonzero()[:, 0]
                probs[:, :, on[:, None], on] = scaled(part[:, :, tokens[:, None], tokens])
        return probs.unflatten(-1, self.grid).unflatten(-3, self.grid)

    def window_maps(self) -> torch.Tensor:
        """Maps of complete windows, shape (B, windows, heads, h, w, h, w).

        Windows with padding, or joined from both ends of the grid by a cyclic shift, are left out. Without complete
        windows (MaxViT's grids), or without windows, the whole grid counts as one window.
        """
        if self.places is not None:
            rows, cols = (torch.arange(n, device=self.places.device) for n in self.window)
            whole = (self.places == self.places[:, :1] + (rows[:, None] * self.grid[1] + cols).flatten()).all(1)
            if whole.any():
                probs = scaled(self.probs.unflatten(0, (-1, len(whole)))[:, whole])
                return probs.unflatten(-1, self.window).unflatten(-3, self.window)
        return self.maps()[:, None]

    def class_maps(self) -> Optional[torch.Tensor]:
        """Attention of the first token to patches, scaled to sum to 1, shape (B, heads, H, W); None without it."""
        size = self.grid[0] * self.grid[1]
        if self.probs.shape[-1] == size:
            return None
        return scaled(self.probs[..., 0, -size:]).unflatten(-1, self.grid)


def window_places(block: Any, x: torch.Tensor, *args: Any) -> Tuple[Tuple[int, int], torch.Tensor, Tuple[int, int]]:
    """Grid, places and window of :class:`LayerProbs`, found by passing coordinates through the block."""
    first = isinstance(block.attn, CHANNELS_FIRST)
    height, width = grid = (x.shape[-2], x.shape[-1]) if first else (x.shape[1], x.shape[2])
    coordinates = x.new_zeros(1, height, width, x.shape[1] if first else x.shape[3])
    coordinates[..., 0] = torch.arange(1, height + 1, device=x.device)[:, None]  # 0 means padding
    coordinates[..., 1] = torch.arange(1, width + 1, device=x.device)
    inputs: List[torch.Tensor] = []

    def attend(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        inputs.append(x)
        return x

    probe: Any = private_copy(block)
    probe._forward_pre_hooks.clear()  # this function runs inside one
    probe.norm1, probe.attn = nn.Identity(), nn.Identity()
    probe.attn.forward = attend
    probe(coordinates.movedim(-1, 1) if first else coordinates, *args)
    seen = inputs[0].movedim(1, -1) if first else inputs[0]
    rows, cols = seen[..., :2].flatten(1, -2).long().unbind(-1)
    window = (seen.shape[1], seen.shape[2]) if seen.dim() == 4 else to_2tuple(block.window_size)
    return grid, torch.where(rows > 0, (rows - 1) * width + cols - 1, -1), window


def read_probs(
        model: nn.Module,
        images: torch.Tensor,
        look: Callable[[LayerProbs], T],
        class_layers: bool = False,
) -> List[T]:
    """Apply a function to the probabilities of each layer, in forward order, without layers of the class token only."""
    net, kinds = private_copy(model), (*TRANSFORMER_ATTENTION, ClassAttn) if class_layers else TRANSFORMER_ATTENTION
    seen: List[T] = []
    context: Dict[Any, Any] = {}  # by layer: grid, and for windows places and window size

    def enter_block(block: Any, args: Any) -> None:
        context[block.attn] = window_places(block, *args)

    def enter(layer: Any, args: Any) -> None:
        x = args[0]
        if x.dim() == 4 and layer not in context:
            context[layer] = (x.shape[2:] if isinstance(layer, CHANNELS_FIRST) else x.shape[1:3],)

    def leave(layer: Any, probs: torch.Tensor) -> None:
        (height, width), *windows = context.pop(layer, None) or (patch_grid(net, images),)
        if probs.dim() == 3:  # SAM has batch and heads in one dimension
            probs = probs.unflatten(0, (-1, layer.num_heads))
        patches = height * width
        if not windows and probs.shape[-1] not in (patches, patches + getattr(net, 'num_prefix_tokens', 1)):
            raise ValueError(
                f'attention maps of shape {list(probs.shape)}: needs (..., tokens, tokens), and {height} x {width} '
                'patches as the last tokens')
        seen.append(look(LayerProbs(probs, (height, width), *windows)))

    for block in [m for m in net.modules() if isinstance(m, WINDOW_BLOCKS)]:
        block.register_forward_pre_hook(enter_block)
    for layer in [m for m in net.modules() if isinstance(m, kinds)]:
        layer.fused_attn = False
        layer.register_forward_pre_hook(enter)
        if isinstance(layer, TalkingHeadAttn):  # probabilities; after mixing, values are signed
            layer.proj_w.register_forward_pre_hook(lambda _, args, layer=layer: leave(layer, args[0].movedim(-1, 1)))
        else:
            layer.attn_drop.register_forward_pre_hook(lambda _, args, layer=layer: leave(layer, args[0]))
    with torch.no_grad():
        net(images)
    return seen
