"""Values of attention heads with few channels."""
from typing import Any

import torch
import torch.nn as nn

from .parameters import head_channels, select_inputs, select_parameter

__all__ = ['HeadValues']


class HeadValues(nn.Module):
    """Values of heads with fewer channels than the layer, ``sum_h (W_val^h W_out^h)`` of equation (4).

    Attributes:
        head_weight: ``W_val`` of each head, shape (heads, dim, head_dim).
        out: ``W_out`` of all heads, a Linear from heads head_dim channels to dim.
    """

    def __init__(self, num_heads: int, dim: int, head_dim: int, device: Any = None, dtype: Any = None):
        super().__init__()
        self.head_weight = nn.Parameter(torch.empty(num_heads, dim, head_dim, device=device, dtype=dtype))
        self.out = nn.Linear(num_heads * head_dim, dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is this module's own as torch does a Linear's weight; the other map initialises itself."""
        bound = self.head_weight.shape[1] ** -0.5
        nn.init.uniform_(self.head_weight, -bound, bound)

    def keep_heads(self, heads: torch.Tensor) -> None:
        """Keep these heads only, shape (n,), in this order."""
        select_inputs(self.out, head_channels(heads, self.head_weight.shape[2]))
        select_parameter(self, 'head_weight', heads)

    @property
    def weight(self) -> torch.Tensor:
        """Product of both maps, of rank head_dim in each head: shape (dim, heads dim)."""
        out = self.out.weight.unflatten(1, (-1, self.head_weight.shape[2]))
        return torch.einsum('hcd,ohd->ohc', self.head_weight, out).flatten(1)

    @property
    def bias(self) -> torch.Tensor:
        return self.out.bias

    def forward(self, gathered: torch.Tensor) -> torch.Tensor:
        """Values of what all heads gather, shape (..., heads dim): shape (..., dim)."""
        gathered = gathered.unflatten(-1, [self.head_weight.shape[0], self.head_weight.shape[1]])
        return self.out(torch.einsum('bijhc,hcd->bijhd', gathered, self.head_weight.to(gathered.dtype)).flatten(-2))
