"""The training loop, with its model, optimizer and state."""
import argparse
import hashlib
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import ModelEmaV3, random_seed
from torch.utils._triton import has_triton
from torch.utils.benchmark import Timer
from tqdm import tqdm

from timm_selfconv.data import Images, check_labels
from timm_selfconv.files import as_value_error
from timm_selfconv.theory import position_blobs
from .augment import Augment, at_size, size_of_epoch
from .net import create_optimizer, muon_in_float32, whiten_stem
from .output import LAST, newest_checkpoint, save_checkpoint, save_history
from .recipes import DEFAULTS

__all__ = ['Training', 'compile_backend', 'gains_by_bfloat16']


def gains_by_bfloat16(device: torch.device) -> bool:
    """Return True if a device multiplies matrices faster in bfloat16 than in float32. CPUs are timed."""
    if device.type != 'cpu':
        return device.type != 'cuda' or torch.cuda.is_bf16_supported(including_emulation=False)
    times = []
    for dtype in (torch.float32, torch.bfloat16):  # process time: other processes may use the CPU
        timer = Timer('x @ x', globals=dict(x=torch.ones(512, 512, dtype=dtype)), timer=time.process_time,
                      num_threads=torch.get_num_threads())
        times.append(min(timer.blocked_autorange(min_run_time=0.1).times))
    return times[1] < times[0]


def compile_backend(wanted: Optional[str], device: torch.device) -> Optional[str]:
    """Return the backend of torch.compile, None for no compilation or if inductor lacks Triton on a GPU."""
    if wanted == 'inductor' and device.type == 'cuda' and not has_triton():
        print('trains without torch.compile: inductor needs Triton, which is not available', flush=True)
        return None
    return wanted or None


class Training:
    """The model of a recipe (:func:`~timm_selfconv.training.net.create_net`), its optimizer and the state of training.

    ``data`` are training images and labels on the device. ``batches`` is the number of batches per epoch, None for
    all full batches. Raises a ValueError if recipe, model and data do not fit together.
    """

    def __init__(self, args: argparse.Namespace, model: Any, data: Images, batches: Optional[int] = None):
        self.args, (self.images, self.labels) = args, data
        device, whole = self.images.device, len(self.images) // args.batch_size
        self.model = model.to(device, memory_format=torch.channels_last)
        self.batches = min(whole, batches or whole)
        self.share = 1 if self.batches == whole else self.batches * args.batch_size / len(self.images)
        self.fingerprint = hashlib.sha256(b''.join(x.cpu().numpy().tobytes() for x in data)).hexdigest()
        self.amp = args.amp and gains_by_bfloat16(device)
        self.check()
        self.augment = Augment(args, self.model, device)
        if args.stem_whitening is not None:
            with as_value_error(f'stem_whitening={args.stem_whitening}'):
                images = at_size(self.augment.normalize(self.images[:5000]), args.img_sizes.get(0))
                stem = self.model.get_submodule(self.model.pretrained_cfg['first_conv'])
                whiten_stem(stem, images, args.stem_whitening)
        self.backend = compile_backend(args.torchcompile, device)
        with as_value_error(f'torchcompile={self.backend!r}'):  # a graph per image size: one for all sizes is slower
            self.forward: Any = torch.compile(
                self.model, backend=self.backend, dynamic=False) if self.backend else self.model
        self.ema = ModelEmaV3(
            self.model, args.model_ema_decay, use_warmup=args.model_ema_warmup) if args.model_ema else None
        self.optimizer = create_optimizer(args, self.model)
        self.scheduler, self.epochs = create_scheduler_v2(
            self.optimizer, **scheduler_kwargs(args), updates_per_epoch=self.batches)
        patch_size = getattr(self.model, 'patch_size', None)
        self.grid = None if patch_size is None else [
            side // patch for side, patch in zip(self.images.shape[-2:], to_2tuple(patch_size))]
        self.history: List[Dict[str, Any]] = []
        self.start, self.seconds = self.heads(), 0.

    def check(self) -> None:
        """Raise a ValueError for keys that do not fit data or model, before the first epoch."""
        args, side = self.args, min(self.images.shape[-2:])
        if not self.batches:
            raise ValueError(f'batch_size={args.batch_size}: needs at most the {len(self.images)} training images')
        check_labels(f'model={args.model!r}', self.labels, self.model.num_classes)
        if args.crop_padding_mode == 'reflect' and args.crop_padding >= side:
            raise ValueError(f'crop_padding={args.crop_padding}: needs less than the image size, {side} pixels')
        if args.stem_whitening is not None and (args.initial_checkpoint or args.pretrained):
            raise ValueError(f'stem_whitening={args.stem_whitening}: needs a model from scratch; has '
                             f'pretrained={args.pretrained}, initial_checkpoint={args.initial_checkpoint!r}')
        for key in ('model', 'img_sizes', 'hardest_half'):
            value: Any = vars(args)[key]
            with as_value_error(f'{key}={value!r}'), torch.no_grad():
                for size in [None] if key == 'model' else value.values():
                    self.model.eval()(at_size(self.images[:1] / 255, size))

    def heads(self) -> Optional[List[List[List[float]]]]:
        """Offsets and covariances of the heads per layer, in the format of :mod:`timm_selfconv.weights.history`."""
        layers = None if self.grid is None else position_blobs(self.result, (self.grid[0], self.grid[1]))
        return None if layers is None else [[
            [float(f'{x:.4g}') for x in (*center, covariance[0][0], covariance[1][1], covariance[0][1])]
            for center, covariance in zip(layer.centers.tolist(), layer.covariances.tolist())] for layer in layers]

    @property
    def result(self) -> nn.Module:
        """The model, or its moving average if there is one."""
        return self.model if self.ema is None else self.ema.module

    def load(self, checkpoint: Dict[str, Any]) -> None:
        """Resume from a checkpoint, in its precision; raise a ValueError if it does not fit or is not finite."""
        if not isinstance(checkpoint, dict) or not {'args', 'steps', 'history', 'seconds'} <= checkpoint.keys():
            raise ValueError('has a checkpoint of another program; choose another folder')
        ours = {**vars(self.args), 'batches': self.batches, 'training images': self.fingerprint}
        theirs = {**ours, **DEFAULTS, **checkpoint['args'], 'batches': checkpoint['steps']}  # old ones have fewer keys
        theirs['training images'] = checkpoint.get('data', self.fingerprint)
        differ = sorted(key for key in ours if ours[key] != theirs[key] and key != 'torchcompile')  # differs by device
        if differ:
            raise ValueError(f'has a run of another recipe ({differ} differ); choose another folder')
        broken = [name for name, value in checkpoint['state_dict'].items() if not value.isfinite().all()]
        if broken:
            raise ValueError(f'its last checkpoint has values in {broken[0]} that are not finite')
        self.model.load_state_dict(checkpoint['state_dict'])
        if self.ema is not None:
            self.ema.module.load_state_dict(checkpoint['state_dict_ema'])
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        self.amp = checkpoint.get('amp', self.args.amp)
        self.history, self.seconds, self.start = checkpoint['history'], checkpoint['seconds'], checkpoint.get('start')

    def loss(self, x: torch.Tensor, target: torch.Tensor, size: Optional[int]) -> torch.Tensor:
        """Mix and resize augmented images, shape (B, C, H, W), and return their loss; labels have shape (B,)."""
        x, target, smoothing = self.augment.mix(x, target, len(self.history))
        return F.cross_entropy(self.forward(at_size(x, size)), target, label_smoothing=smoothing)

    @torch.no_grad()
    def hardest_half(self, x: torch.Tensor, target: torch.Tensor, size: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """The half of a batch with the highest losses at a small size (selective backprop, arXiv:1910.00762)."""
        self.model.eval()  # keeps running statistics
        # a separate context: older torch versions cache its casted weights, which have no gradients
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            logits = self.forward(at_size(x, size))
        self.model.train()
        chosen = F.cross_entropy(logits.float(), target, reduction='none').topk(len(x) - len(x) // 2).indices
        return x[chosen], target[chosen]

    def epoch(self) -> float:
        """Train for one epoch and return the mean loss; raise a FloatingPointError if it is not finite."""
        args, epoch, device = self.args, len(self.history), self.images.device
        random_seed(args.seed, 1000 * (epoch + 1))  # the same numbers in a resumed run
        order = torch.randperm(len(self.images), device=device)[:self.batches * args.batch_size]
        batches, losses = order.split(args.batch_size), torch.zeros(self.batches, device=device)
        size, glance = size_of_epoch(args.img_sizes, epoch), size_of_epoch(args.hardest_half, epoch)
        self.model.train()
        for step, chosen in enumerate(tqdm(batches, desc=f'epoch {epoch}', unit='step', leave=False, disable=None)):
            self.optimizer.zero_grad()
            x, target = self.augment(self.images[chosen]), self.labels[chosen]
            if glance is not None:
                x, target = self.hardest_half(x, target, glance)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.amp):
                loss = self.loss(x, target, size)
            loss.backward()
            losses[step] = loss.detach()
            # rarely on a GPU: reading a loss synchronises
            if (device.type == 'cpu' or step % 100 == 99 or step + 1 == self.batches) and not losses.isfinite().all():
                bad = int((~losses.isfinite()).nonzero()[0])
                raise FloatingPointError(f'epoch {epoch}, step {bad}: the loss is {losses[bad]}')
            if args.clip_grad is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), args.clip_grad)
            with nullcontext() if self.amp else muon_in_float32():
                self.optimizer.step()
            updates = epoch * self.batches + step + 1
            if self.ema is not None:
                self.ema.update(self.model, step=updates)
            self.scheduler.step_update(updates)
        return float(losses.mean())

    def validate(self, data: Images) -> Dict[str, float]:
        """Return mean loss, and top-1 and top-5 accuracy in percent, in eval mode."""
        images, labels = data
        self.result.eval()
        with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=self.amp):
            logits = torch.cat([self.result(self.augment.normalize(x)) for x in images.split(500)]).float()
        hit = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        return dict(
            eval_loss=float(F.cross_entropy(logits, labels)),
            eval_top1=100 * int(hit[:, 0].sum()) / len(hit), eval_top5=100 * int(hit.any(1).sum()) / len(hit))

    def run(self, validation: Images, output: Path) -> None:
        """Train to the end of the recipe, from the run in the folder if there is one, and save each epoch there."""
        path, checkpoint = newest_checkpoint(output, self.images.device)
        if path is not None:
            with as_value_error(f'output={str(output)!r}'):
                self.load(checkpoint)
            os.replace(path, output / LAST)
            save_history(output, checkpoint, self.grid, self.share)  # in case it was killed before
        if self.args.amp and not self.amp:
            print('trains in float32: this device, or the device of the resumed run, is slower in bfloat16', flush=True)
        self.scheduler.step_update(len(self.history) * self.batches)
        while len(self.history) < self.epochs:
            self.scheduler.step(len(self.history))
            start = time.perf_counter()
            row: Dict[str, Any] = dict(epoch=len(self.history), train_loss=self.epoch())
            speed = self.batches * self.args.batch_size / (time.perf_counter() - start)
            if (row['epoch'] + 1) % self.args.val_interval == 0 or row['epoch'] + 1 == self.epochs:
                row.update(self.validate(validation))
            self.seconds += time.perf_counter() - start
            row['lr'] = self.optimizer.param_groups[0]['lr']
            print(' '.join(f'{k} {v:.5g}' for k, v in row.items()), f'{self.seconds:.0f} s', flush=True)
            self.history.append(dict(row, images_per_second=round(speed, 1), heads=self.heads()))
            self.save(output)

    def save(self, output: Path) -> None:
        """Save the state to resume from, in the layout of timm's checkpoints, and the history."""
        ema = {} if self.ema is None else dict(state_dict_ema=self.ema.module.state_dict())
        checkpoint: Dict[str, Any] = dict(
            epoch=len(self.history) - 1, arch=self.args.model, version=2, args=vars(self.args), amp=self.amp,
            steps=self.batches, data=self.fingerprint, state_dict=self.model.state_dict(), **ema,
            optimizer=self.optimizer.state_dict(), history=self.history, start=self.start, seconds=self.seconds)
        save_checkpoint(output, checkpoint, self.args.checkpoint_hist)
        save_history(output, checkpoint, self.grid, self.share)
