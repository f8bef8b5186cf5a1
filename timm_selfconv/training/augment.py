"""Augmentation of batches on their device. timm's loader augments single images in worker processes."""
import argparse
from typing import Dict, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torchvision.transforms.v2.functional import pad

from timm_selfconv.data import data_config

__all__ = ['Augment', 'at_size', 'padded_crop', 'size_of_epoch']


def size_of_epoch(sizes: Dict[int, int], epoch: int) -> Optional[int]:
    """Return the image size of an epoch from sizes by first epoch, None before the first."""
    return next((sizes[start] for start in sorted(sizes, reverse=True) if start <= epoch), None)


def at_size(x: torch.Tensor, size: Optional[int]) -> torch.Tensor:
    """Resize images, shape (B, C, H, W), to ``size`` x ``size`` pixels; None leaves them unchanged."""
    if size is not None and x.shape[-2:] != (size, size):
        x = F.interpolate(x, (size, size), mode='bilinear', antialias=True)
    return x.contiguous(memory_format=torch.channels_last)


def padded_crop(x: torch.Tensor, padding: int, mode: str = 'constant') -> torch.Tensor:
    """Pad images, shape (B, C, H, W), with black (or 'reflect', mirrored) pixels and crop each at random to (H, W)."""
    batch, channels, height, width = x.shape
    x = pad(x, padding, padding_mode=mode)
    top, left = torch.randint(2 * padding + 1, (2, batch, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    cols = left + torch.arange(width, device=x.device)
    b, c = torch.arange(batch, device=x.device), torch.arange(channels, device=x.device)
    return x[b[:, None, None, None], c[:, None, None], rows[:, None, :, None], cols[:, None, None, :]]


class Augment:
    """Augments uint8 images, shape (B, C, H, W), on their device, and normalises them for a model."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        config = data_config(model)
        self.args = args
        self.mean, self.std = (torch.tensor(config[k], device=device).view(1, -1, 1, 1) for k in ('mean', 'std'))
        self.erase = RandomErasing(args.reprob, mode='pixel', device=device)
        self.mixup: Optional[Mixup] = None
        if args.mixup or args.cutmix:
            pairs = 4 if args.hardest_half else 2
            if args.batch_size % pairs:
                raise ValueError(f'batch_size={args.batch_size}: mixup and cutmix need a multiple of {pairs}')
            self.mixup = Mixup(
                args.mixup, args.cutmix, prob=args.mixup_prob, label_smoothing=args.smoothing,
                num_classes=model.num_classes)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 255 - self.mean) / self.std

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Crop, flip, normalise, erase."""
        x = padded_crop(x, self.args.crop_padding, self.args.crop_padding_mode)
        flip = torch.rand(len(x), 1, 1, 1, device=x.device) < self.args.hflip
        return self.erase(self.normalize(torch.where(flip, x.flip(3), x)))

    def mix(self, x: torch.Tensor, target: torch.Tensor, epoch: int) -> Tuple[torch.Tensor, torch.Tensor, float]:
        """Apply mixup before ``mixup_off_epoch``; return images, labels and the label smoothing still to apply."""
        if self.mixup is None:
            return x, target, self.args.smoothing
        self.mixup.mixup_enabled = not 0 < self.args.mixup_off_epoch <= epoch
        return *self.mixup(x, target), 0.  # Mixup smooths labels
