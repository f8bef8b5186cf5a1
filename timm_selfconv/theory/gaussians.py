"""Heads as Gaussians around the query: exact for quadratic encodings, mean and covariance for learned ones."""
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
import torch.nn as nn

from timm_selfconv.layers import ConvAttention, QuadraticEncoding, SelfAttention2d

__all__ = ['Blobs', 'encoding_blobs', 'position_blobs']

FLATTEST = 1e-8  # least precision, in 1 / pixels^2: a standard deviation of 10,000 pixels


@dataclass(frozen=True)
class Blobs:
    """A Gaussian per head, in pixels of the layer's grid, relative to the query.

    Attributes:
        centers: Means, (row, column), shape (heads, 2).
        covariances: Shape (heads, 2, 2).
    """
    centers: torch.Tensor
    covariances: torch.Tensor


def position_encodings(model: nn.Module) -> List[Any]:
    """Encodings of a net that attends by position only, else an empty list."""
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    return [layer.encoding for layer in layers] if all(layer.terms == ('position',) for layer in layers) else []


def gaussian(encoding: Any) -> Blobs:
    precisions, axes = torch.linalg.eigh(encoding.precisions().detach().cpu().double())
    covariances = axes @ torch.diag_embed(1 / precisions.clamp(min=FLATTEST)) @ axes.mT
    return Blobs(encoding.centers.detach().cpu().double(), covariances)


def encoding_blobs(model: nn.Module) -> Optional[List[Blobs]]:
    """Gaussians of quadratic encodings (equation 9), one entry per layer; None for other nets.

    A convolutional net has one entry per layer that became attention, in pixels of its input.
    """
    convs = [m for m in model.modules() if isinstance(m, ConvAttention)]
    if convs:
        return None if any(m.content or len(m.kernel_size) != 2 for m in convs) else [gaussian(m) for m in convs]
    encodings = position_encodings(model)
    if not all(isinstance(encoding, QuadraticEncoding) for encoding in encodings):
        return None
    return [gaussian(encoding) for encoding in encodings] or None


@torch.no_grad()
def moments(encoding: Any, grid: Tuple[int, int]) -> Blobs:
    """Mean and covariance of the attention of the grid's middle query, for an encoding with separable scores."""
    rows, cols, _ = encoding.offset_tables(*grid)
    centers, variances = [], []
    for table, size in ((rows, grid[0]), (cols, grid[1])):
        offsets = torch.arange(size, dtype=torch.double) - size // 2
        probs = table[:, size - 1 - size // 2:2 * size - 1 - size // 2].softmax(-1)
        centers.append(probs @ offsets)
        variances.append(probs @ offsets.square() - centers[-1].square())
    return Blobs(torch.stack(centers, -1), torch.diag_embed(torch.stack(variances, -1)))


def position_blobs(model: nn.Module, grid: Tuple[int, int]) -> Optional[List[Blobs]]:
    """Gaussians of a net that attends by position only, one entry per layer, in float64; None for other nets.

    A learned encoding has the mean and covariance of the middle query's attention on a grid of (rows, columns).
    """
    return [
        gaussian(encoding) if isinstance(encoding, QuadraticEncoding) else moments(encoding, grid)
        for encoding in position_encodings(model)] or None
