"""Attention maps of heads, shape (..., H, W, H, W), query before key."""
import itertools

import torch

from tiny_nets import noise


def random_maps(*shape, seed=0, sharpness=2.):
    """Return the softmax of noise, shape (..., H, W). No statistic is equal for all queries."""
    scores = sharpness * noise(*shape, shape[-2] * shape[-1], seed=seed)
    return scores.softmax(-1).unflatten(-1, shape[-2:])


def convit_position_maps(weight, height, width):
    """Return the softmax of ConViT's position scores over all keys, shape (heads, H W, H W)."""
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).to(weight)
    d1, d2 = (pixels[None] - pixels[:, None]).unbind(-1)  # query before key
    return torch.stack([(a * d2 + b * d1 + c * (d1 ** 2 + d2 ** 2)).softmax(-1) for a, b, c in weight])


def shift_maps(offsets, height=6, width=7):
    """Return one-hot maps, one head per offset. The nearest pixel replaces a key outside the grid."""
    maps = torch.zeros(len(offsets), height, width, height, width, dtype=torch.double)
    for (head, (a, b)), i, j in itertools.product(enumerate(offsets), range(height), range(width)):
        maps[head, i, j, min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)] = 1.
    return maps
