"""Augmentation of batches on their device. timm's loader augments single images in worker processes."""
import argparse
import math
from typing import Dict, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import Mixup
from torchvision.transforms.v2.functional import pad

from timm_selfconv.data import data_config

__all__ = ['Augment', 'at_size', 'padded_crop', 'random_erasing', 'random_resized_crop', 'size_of_epoch']


def size_of_epoch(sizes: Dict[int, int], epoch: int) -> Optional[int]:
    """Return the image size of an epoch from sizes by first epoch, None before the first."""
    return next((sizes[start] for start in sorted(sizes, reverse=True) if start <= epoch), None)


def at_size(x: torch.Tensor, size: Optional[int]) -> torch.Tensor:
    """Resize images, shape (B, C, H, W), to ``size`` x ``size`` pixels; None leaves them unchanged."""
    if size is not None and size != x.shape[-1]:
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


def random_windows(
        x: torch.Tensor, scale: Sequence[float], ratio: Sequence[float], margin: int = 0) -> Tuple[torch.Tensor, ...]:
    """Draw a window per image, shape (B, C, H, W): the first of ten draws that fits, as in timm's augmentations.

    The area is a fraction of the image within ``scale``, width over height is within ``ratio``, and windows are smaller
    than the image by ``margin`` pixels. Returns top, left, height, width and whether a draw fits, shape (B,) each.
    """
    batch, _, height, width = x.shape
    draws = torch.rand(2, 10, batch, device=x.device)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[0])
    aspect = torch.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[1])
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w <= width - margin) & (h <= height - margin)
    first = fits.int().argmax(0, keepdim=True)
    w, h = w.gather(0, first)[0].clamp(1, width), h.gather(0, first)[0].clamp(1, height)
    corner = torch.rand(2, batch, device=x.device)
    return (corner[0] * (height - h + 1)).floor(), (corner[1] * (width - w + 1)).floor(), h, w, fits.any(0)


def random_resized_crop(
        x: torch.Tensor, scale: Sequence[float], ratio: Sequence[float], interpolation: str) -> torch.Tensor:
    """Crop float images, shape (B, C, H, W), to :func:`random_windows` and resize them to (H, W), as timm does."""
    batch, _, height, width = x.shape
    top, left, h, w, _ = random_windows(x, scale, ratio)
    theta = x.new_zeros(batch, 2, 3)  # output to input coordinates, both from -1 to 1
    theta[:, 0, 0], theta[:, 0, 2] = w / width, (2 * left + w) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = h / height, (2 * top + h) / height - 1
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode=interpolation, padding_mode='border', align_corners=False)


def random_erasing(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Fill a random window of some images, shape (B, C, H, W), with noise, as timm's RandomErasing, without a loop."""
    top, left, h, w, fits = (t[:, None] for t in random_windows(x, (0.02, 1 / 3), (0.3, 1 / 0.3), margin=1))
    rows, cols = (torch.arange(size, device=x.device) for size in x.shape[2:])
    chosen = fits & (torch.rand(len(x), 1, device=x.device) < probability)
    window = ((rows >= top) & (rows < top + h) & chosen)[:, :, None] & ((cols >= left) & (cols < left + w))[:, None]
    return torch.where(window[:, None], torch.randn_like(x), x)


class Augment:
    """Augments uint8 images, shape (B, C, H, W), on their device, and normalises them for a model."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        config = data_config(model)
        self.args = args
        self.mean, self.std = (torch.tensor(config[k], device=device).view(1, -1, 1, 1) for k in ('mean', 'std'))
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
        if self.args.crop_padding is not None:
            x = padded_crop(x, self.args.crop_padding, self.args.crop_padding_mode)
        else:
            x = random_resized_crop(x.float(), self.args.scale, self.args.ratio, self.args.train_interpolation)
        flip = torch.rand(len(x), 1, 1, 1, device=x.device) < self.args.hflip
        x = self.normalize(torch.where(flip, x.flip(3), x))
        return random_erasing(x, self.args.reprob) if self.args.reprob else x

    def mix(self, x: torch.Tensor, target: torch.Tensor, epoch: int) -> Tuple[torch.Tensor, torch.Tensor, float]:
        """Apply mixup before ``mixup_off_epoch``; return images, labels and the label smoothing still to apply."""
        if self.mixup is None:
            return x, target, self.args.smoothing
        self.mixup.mixup_enabled = not 0 < self.args.mixup_off_epoch <= epoch
        return *self.mixup(x, target), 0.  # Mixup smooths labels
