"""Heads as Gaussians around the query: exact for quadratic encodings, mean and covariance for learned ones."""
from dataclasses import dataclass
from typing import List, Optional, Tuple, Union

import torch
import torch.nn as nn

from timm_selfconv.layers import ConvAttention, LearnedEncoding, QuadraticEncoding, SelfAttention2d

__all__ = ['Blobs', 'position_blobs']

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


def gaussian(layer: Union[ConvAttention, QuadraticEncoding]) -> Blobs:
    precisions, axes = torch.linalg.eigh(layer.precisions().detach().cpu().double())
    covariances = axes @ torch.diag_embed(1 / precisions.clamp(min=FLATTEST)) @ axes.mT
    return Blobs(layer.centers.detach().cpu().double(), covariances)


@torch.no_grad()
def moments(encoding: LearnedEncoding, grid: Tuple[int, int]) -> Blobs:
    """Mean and covariance of the attention of the grid's middle query, for an encoding with separable scores."""
    rows, cols, _ = encoding.offset_tables(*grid)
    centers, variances = [], []
    for table, size in ((rows, grid[0]), (cols, grid[1])):
        offsets = torch.arange(size, dtype=torch.double) - size // 2
        probs = table.narrow(1, (size - 1) // 2, size).softmax(-1)
        centers.append(probs @ offsets)
        variances.append(probs @ offsets.square() - centers[-1].square())
    return Blobs(torch.stack(centers, -1), torch.diag_embed(torch.stack(variances, -1)))


def position_blobs(model: nn.Module, grid: Optional[Tuple[int, int]] = None) -> Optional[List[Blobs]]:
    """Gaussians of a net that attends by position only, one entry per layer, in float64; None for other nets.

    Quadratic encodings (equation 9) are Gaussians. So are convolutions that became attention, in pixels of their input.
    A learned encoding has the mean and covariance of the middle query's attention on a grid of (rows, columns), and
    none without a grid.
    """
    blobs = []
    for layer in model.modules():
        if not isinstance(layer, (ConvAttention, SelfAttention2d)):
            continue
        heads = layer if isinstance(layer, ConvAttention) else layer.encoding if layer.terms == ('position',) else None
        if isinstance(heads, QuadraticEncoding) or (isinstance(heads, ConvAttention) and len(heads.kernel_size) == 2):
            blobs.append(gaussian(heads))
        elif isinstance(heads, LearnedEncoding) and grid is not None:
            blobs.append(moments(heads, grid))
        else:
            return None
    return blobs or None
