"""Absolute encoding: one vector per position, sinusoid or learned (equations 3 and 7)."""
from typing import Any, TYPE_CHECKING, Final, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_module, resample_abs_pos_embed_nhwc, trunc_normal_

__all__ = ['AbsoluteEncoding']


def sinusoids(size: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Sines, then cosines along one axis (Vaswani et al., 2017), shape (size, dim), at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    bands = torch.arange(dim // 2, device=like.device, dtype=dtype) / (dim // 2)
    angles = torch.arange(size, device=like.device, dtype=dtype)[:, None] / torch.pow(10000., bands)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


@register_notrace_module
class AbsoluteEncoding(nn.Module):
    """Absolute encoding, equations (3) and (7): one vector per position, added to the input of queries and keys.

    Attributes:
        table: Learned vectors, shape (H, W, dim). None for sinusoids, which encode rows in the first half of the
            channels and columns in the second.
    """
    learned: Final[bool]
    if TYPE_CHECKING:
        table: torch.Tensor

    def __init__(
            self, dim: int, grid_size: Tuple[int, int], learned: bool = True, device: Any = None, dtype: Any = None,
    ):
        """
        Args:
            dim: Channels of the vectors, divisible by 4 for sinusoids.
            grid_size: Rows and columns of the input; sinusoids take any.
            learned: Use learned vectors, not sinusoids.

        Raises:
            ValueError: If dim is not divisible by 4 for sinusoids.
        """
        super().__init__()
        self.dim = dim
        self.learned = learned
        if not learned and dim % 4:
            raise ValueError(f"dim={dim}: encoding='sinusoid' needs a multiple of 4")
        table = nn.Parameter(torch.empty(*grid_size, dim, device=device, dtype=dtype)) if learned else None
        self.register_parameter('table', table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            trunc_normal_(self.table, std=0.02)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Resample learned vectors for other (rows, columns)."""
        if self.learned and tuple(self.table.shape[:2]) != tuple(grid_size):
            table = resample_abs_pos_embed_nhwc(self.table.detach(), list(grid_size))[0]
            self.register_parameter('table', nn.Parameter(table.contiguous(), self.table.requires_grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the vectors to x, shape (B, H, W, dim), or raise a ValueError if the learned table has another size."""
        height, width = x.shape[1], x.shape[2]
        if not self.learned:
            rows, cols = sinusoids(height, self.dim // 2, x), sinusoids(width, self.dim // 2, x)
            vectors = torch.cat([rows[:, None].expand(-1, width, -1), cols[None].expand(height, -1, -1)], dim=-1)
            return x + vectors.to(x.dtype)
        if height != self.table.shape[0] or width != self.table.shape[1]:
            raise ValueError(
                f'the input has {height} x {width} positions, but the learned absolute encoding has '
                f'{self.table.shape[0]} x {self.table.shape[1]}: '
                'create the model with that img_size or call set_input_size(img_size=...)')
        return x + self.table
