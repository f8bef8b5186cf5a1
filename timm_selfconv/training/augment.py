"""Augmentation of a batch on its device: what timm's loader does to single images in processes of its own."""
import argparse

import torch
import torch.nn as nn
from timm.data import resolve_data_config

from timm_selfconv.data import padded_crop, random_resized_crop, random_windows

__all__ = ['Augment', 'random_erasing']


def random_erasing(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Fill a window of images, shape (B, C, H, W), with noise, as timm's RandomErasing, which loops over images."""
    top, left, h, w, fits = (t[:, None] for t in random_windows(x, (0.02, 1 / 3), (0.3, 1 / 0.3), margin=1))
    rows, cols = (torch.arange(size, device=x.device) for size in x.shape[2:])
    chosen = fits & (torch.rand(len(x), 1, device=x.device) < probability)
    window = ((rows >= top) & (rows < top + h) & chosen)[:, :, None] & ((cols >= left) & (cols < left + w))[:, None]
    return torch.where(window[:, None], torch.randn_like(x), x)


class Augment:
    """From uint8 images, shape (B, C, H, W), to what the net sees, on their device."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        config = resolve_data_config({}, model=model)
        self.args = args
        self.mean, self.std = (torch.tensor(config[k], device=device).view(1, -1, 1, 1) for k in ('mean', 'std'))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 255 - self.mean) / self.std

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Crop, flip, normalise, erase."""
        if self.args.crop_padding is not None:
            x = padded_crop(x, self.args.crop_padding)
        else:
            x = random_resized_crop(x.float(), self.args.scale, self.args.ratio, self.args.train_interpolation)
        flip = torch.rand(len(x), 1, 1, 1, device=x.device) < self.args.hflip
        x = self.normalize(torch.where(flip, x.flip(3), x))
        return random_erasing(x, self.args.reprob) if self.args.reprob else x
