"""Gated sum of attention by content and attention by position, without their maps."""
from typing import Any, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import register_notrace_module, use_fused_attn

from .encodings import axis_offsets
from .functional import at_least_float32, maps_of_factors

__all__ = ['GatedAttention']


@register_notrace_module
class GatedAttention(nn.Module):
    """Gated positional self-attention of tokens on a grid (GPSA, d'Ascoli et al., 2021).

    With ``delta = k - q`` the offset of a key from a query, rows first, head h attends with

        (1 - g) softmax(x_q Wq Wk' x_k / sqrt(D_h))  +  g softmax(a d2 + b d1 + c |delta|^2),  g = sigmoid(gating_param)
                content                                   position

    Both parts sum to 1, so the output is the gated sum of two outputs: content by torch's fused attention, and position
    by row and column factors. With ``fused_attn = False`` or dropout the layer makes the explicit map.

    https://arxiv.org/abs/2103.10697
    """

    def __init__(self, layer: Any, grid_size: Tuple[int, int]):
        """
        Args:
            layer: timm's ``GPSA``. Its modules and parameters are used, with the same names.
            grid_size: Rows and columns of the tokens.
        """
        super().__init__()
        self.num_heads = layer.num_heads
        self.grid_size = grid_size
        self.fused_attn = use_fused_attn()
        self.qk = layer.qk
        self.v = layer.v
        self.attn_drop = layer.attn_drop
        self.proj = layer.proj
        self.pos_proj = layer.pos_proj
        self.proj_drop = layer.proj_drop
        self.gating_param = layer.gating_param
        self.train(layer.training)

    def factors(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return row and column factors of attention by position, at least float32, query before key.

        Their shapes are (heads, H, H) and (heads, W, W).
        """
        weight = at_least_float32(self.pos_proj.weight)
        col_slope, row_slope, square = weight[:, :, None, None].unbind(1)
        rows, cols = (axis_offsets(size, weight) for size in self.grid_size)
        # the bias has no effect, but trainers expect its gradient, 0
        row_scores = rows * (row_slope + square * rows) + at_least_float32(self.pos_proj.bias)[:, None, None]
        return row_scores.softmax(-1), (cols * (col_slope + square * cols)).softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x, shape (B, N, C), to the same shape.

        Raises:
            ValueError: If the N tokens of x do not fill the grid.
        """
        height, width = self.grid_size
        if x.shape[1] != height * width:
            raise ValueError(f'x of shape {list(x.shape)}: needs {height} x {width} tokens')
        query, key = self.qk(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        value = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        gate = at_least_float32(self.gating_param).sigmoid()[:, None, None]
        if self.fused_attn and not (self.training and self.attn_drop.p > 0.):
            content = F.scaled_dot_product_attention(query, key, value)
            rows, cols = (factor.to(value.dtype) for factor in self.factors())
            met = (rows @ value.unflatten(2, (height, width)).flatten(3)).unflatten(3, (width, -1))
            position = (cols[:, None] @ met).flatten(2, 3).to(content.dtype)
            x = torch.lerp(content, position, gate.to(content.dtype))
        else:
            content = at_least_float32(query * query.shape[3] ** -0.5 @ key.transpose(-2, -1)).softmax(-1)
            attn = self.attn_drop(torch.lerp(content, maps_of_factors(*self.factors())[0], gate))
            x = attn.to(value.dtype) @ value
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))
