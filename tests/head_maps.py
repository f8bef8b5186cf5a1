"""Attention maps of heads, shape (..., H, W, H, W), query before key."""
import itertools

import torch


def random_maps(*shape, seed=0, sharpness=2.):
    """Softmax of noise, of shape (..., H, W): nothing about the maps is constant over queries."""
    generator = torch.Generator().manual_seed(seed)
    *heads, height, width = shape
    scores = sharpness * torch.randn(*heads, height, width, height * width, generator=generator, dtype=torch.double)
    return scores.softmax(-1).unflatten(-1, (height, width))


def convit_position_maps(weight, height, width):
    """Softmax over all keys of each head's position scores in ConViT, shape (heads, H W, H W)."""
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).to(weight)
    d1, d2 = (pixels[None] - pixels[:, None]).unbind(-1)  # query before key
    return torch.stack([(a * d2 + b * d1 + c * (d1 ** 2 + d2 ** 2)).softmax(-1) for a, b, c in weight])


def shift_maps(offsets, height=6, width=7):
    """One-hot maps, one head an offset; a key outside the grid gives way to the nearest inside."""
    maps = torch.zeros(len(offsets), height, width, height, width, dtype=torch.double)
    for (head, (a, b)), i, j in itertools.product(enumerate(offsets), range(height), range(width)):
        maps[head, i, j, min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)] = 1.
    return maps
