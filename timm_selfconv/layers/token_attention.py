"""Self-attention of tokens for vision transformers, with heads as wide as the layer."""
from typing import Any, Final, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.layers import use_fused_attn

__all__ = ['TokenAttention']


class TokenAttention(nn.Module):
    """Self-attention of tokens, with heads of width ``dim``, which can use given keys.

    It is not an ``attn_layer`` for timm's vision transformers. They pass ``qkv_bias``, norms and masks, and their heads
    have width ``dim / num_heads``.
    """
    fused_attn: Final[bool]

    def __init__(
            self,
            dim: int,
            num_heads: int,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device: Any = None,
            dtype: Any = None,
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
        """Return keys of x, shape (B, N, dim): shape (B, heads, N, dim)."""
        return self._heads(self.key(x))

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Map x, shape (B, N, dim), to the same shape. ``key`` replaces the keys of x, see :meth:`keys`."""
        if key is None:
            key = self.keys(x)
        query, value = self._heads(self.query(x)), self._heads(self.value(x))
        drop = self.attn_drop.p if self.training else 0.
        if self.fused_attn:
            x = F.scaled_dot_product_attention(query, key, value, dropout_p=drop).transpose(1, 2)
        else:
            attn = (query * self.scale) @ key.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = (attn @ value).transpose(1, 2)
        return self.proj_drop(self.proj(x.flatten(2)))
