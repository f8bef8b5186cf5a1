"""Initialisation that a recipe adds to the net's own."""
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ['whiten_stem']


@torch.no_grad()
def whiten_stem(conv: nn.Conv2d, images: torch.Tensor, scale: float, eps: float = 5e-4) -> None:
    """Initialise a first convolution as the whitening transform of the patches that it sees (Jordan, 2024).

    What leaves it is centred and, but for ``eps``, has equal variance along all principal components of the patches.
    A random semi-orthogonal matrix spreads these components over the output channels, however many there are, so that
    each has a standard deviation of ``scale`` on average (arXiv:2404.00498; there each component fills two channels,
    one with its sign turned).

    Args:
        conv: The convolution, not grouped.
        images: Images as the net sees them, shape (B, C, H, W).
        scale: Standard deviation of the output channels.
        eps: Added to the variances of the components, in squared units of the images.

    Raises:
        ValueError: If the convolution is grouped.
    """
    if conv.groups != 1:
        raise ValueError(f'groups={conv.groups}: whitening needs a convolution that is not grouped')
    padding: Any = conv.padding
    patches = F.unfold(images.double(), conv.kernel_size, conv.dilation, padding, conv.stride)
    patches = patches.transpose(0, 1).flatten(1)  # a row per input of the kernel, a column per patch
    variances, components = torch.linalg.eigh(patches.cov())
    whitening = components.T / (variances.clamp(min=0.) + eps).sqrt()[:, None]
    spread = nn.init.orthogonal_(torch.empty(conv.out_channels, len(whitening))).to(whitening)
    weight = scale * max(1., conv.out_channels / len(whitening)) ** 0.5 * spread @ whitening
    conv.weight.copy_(weight.view_as(conv.weight))
    if conv.bias is not None:
        conv.bias.copy_(-weight @ patches.mean(1))
