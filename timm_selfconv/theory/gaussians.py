"""Heads as Gaussians around the query: exactly what quadratic ones are, mean and covariance of other positions."""
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
import torch.nn as nn

from timm_selfconv.layers import ConvAttention, QuadraticEncoding, SelfAttention2d

__all__ = ['Blobs', 'encoding_blobs', 'position_blobs']

FLATTEST = 1e-8  # precision, in 1 / pixels^2, below which a head has none


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
    """The encodings of a net that attends by relative position only, else none."""
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    return [layer.encoding for layer in layers] if all(layer.terms == ('position',) for layer in layers) else []


def gaussian(encoding: Any) -> Blobs:
    """The Gaussians of equation (9). A precision below 1e-8 counts as 1e-8: a standard deviation of 10,000 pixels."""
    precisions, axes = torch.linalg.eigh(encoding.precisions().detach().cpu().double())
    covariances = axes @ torch.diag_embed(1 / precisions.clamp(min=FLATTEST)) @ axes.mT
    return Blobs(encoding.centers.detach().cpu().double(), covariances)


def encoding_blobs(model: nn.Module) -> Optional[List[Blobs]]:
    """The Gaussians that quadratic encodings are (equation 9), one entry per layer; None for other nets.

    Of a convolutional net they are the layers that became attention, in pixels of their inputs.
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
    """Mean and covariance of what the grid's middle query gives to offsets, for an encoding of separable scores."""
    rows, cols, _ = encoding.offset_tables(*grid)
    centers, variances = [], []
    for table, size in ((rows, grid[0]), (cols, grid[1])):
        offsets = torch.arange(size, dtype=torch.double) - size // 2
        probs = table[:, size - 1 - size // 2:2 * size - 1 - size // 2].softmax(-1)
        centers.append(probs @ offsets)
        variances.append(probs @ offsets.square() - centers[-1].square())
    return Blobs(torch.stack(centers, -1), torch.diag_embed(torch.stack(variances, -1)))


def position_blobs(model: nn.Module, grid: Tuple[int, int]) -> Optional[List[Blobs]]:
    """The heads of a net that attends by position only as Gaussians, one entry per layer, in float64; None for others.

    Learned encodings have the mean and covariance of the middle query's attention to a grid of (rows, columns).
    """
    return [
        gaussian(encoding) if isinstance(encoding, QuadraticEncoding) else moments(encoding, grid)
        for encoding in position_encodings(model)] or None
