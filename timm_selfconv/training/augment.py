"""Augmentation of a batch on its device: what timm's loader does to single images in processes of its own."""
import argparse

import torch
import torch.nn as nn
from timm.data import resolve_data_config
from timm.data.random_erasing import RandomErasing

from timm_selfconv.data import padded_crop, random_resized_crop

__all__ = ['Augment']


class Augment:
    """From uint8 images, shape (B, C, H, W), to what the net sees, on their device."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        config = resolve_data_config({}, model=model)
        self.args = args
        self.mean, self.std = (torch.tensor(config[k], device=device).view(1, -1, 1, 1) for k in ('mean', 'std'))
        self.erase = RandomErasing(args.reprob, mode='pixel', device=str(device)) if args.reprob else nn.Identity()

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 255 - self.mean) / self.std

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Crop, flip, normalise, erase."""
        if self.args.crop_padding is not None:
            x = padded_crop(x, self.args.crop_padding)
        else:
            x = random_resized_crop(x.float(), self.args.scale, self.args.ratio, self.args.train_interpolation)
        flip = torch.rand(len(x), 1, 1, 1, device=x.device) < self.args.hflip
        return self.erase(self.normalize(torch.where(flip, x.flip(3), x)))
