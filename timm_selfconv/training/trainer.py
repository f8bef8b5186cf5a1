"""A net and all that changes while it trains."""
import argparse
import csv
import hashlib
import math
import os
import re
import shutil
import time
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import Mixup
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.task import DistillationTeacher
from timm.utils import ModelEmaV3, random_seed
from torch.utils.benchmark import Timer
from tqdm import tqdm

from timm_selfconv.data import Images
from timm_selfconv.files import replace_file
from timm_selfconv.theory import position_blobs
from timm_selfconv.weights.history import HISTORY, write_history
from .augment import Augment, at_size, size_of_epoch
from .distillation import Student, distillation_loss, logits_and_maps, map_loss
from .initialization import whiten_stem
from .optimization import muon_in_float32, scaled_groups
from .recipes import DEFAULTS, as_value_error

__all__ = ['Training', 'gains_by_bfloat16', 'write_summary']

FUSED = ('sgd', 'momentum', 'adam', 'adamw')


def gains_by_bfloat16(device: torch.device) -> bool:
    """Return True if a device multiplies matrices faster in bfloat16 than in float32.

    CPUs are timed: without arithmetic for it they take many times as long, and some that have it twice as long.
    """
    if device.type != 'cpu':
        return True
    in_float32, in_bfloat16 = (
        Timer('x @ x', globals=dict(x=torch.ones(512, 512, dtype=dtype)), num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=0.05).median for dtype in (torch.float32, torch.bfloat16))
    return in_bfloat16 < in_float32


class Training:
    """A net and all that changes while it trains."""

    def __init__(self, args: argparse.Namespace, model: Any, data: Images, batches: Optional[int] = None):
        """
        Args:
            args: The recipe.
            model: Its net, see :func:`~timm_selfconv.training.net.create_net`.
            data: Training images and labels, on the device to train on.
            batches: Batches an epoch; all whole ones if None.

        Raises:
            ValueError: If the recipe and the data don't fit each other or the net.
        """
        self.args = args
        self.images, self.labels = data
        device = self.images.device
        self.batches = min(len(self.images) // args.batch_size, batches or len(self.images))
        if not self.batches:
            raise ValueError(f'batch_size={args.batch_size}: needs at most the {len(self.images)} training images')
        whole = self.batches == len(self.images) // args.batch_size
        self.share = 1 if whole else self.batches * args.batch_size / len(self.images)  # of the images, an epoch
        self.steps = math.ceil(self.batches / args.grad_accum_steps)
        self.fingerprint = hashlib.sha256(b''.join(x.cpu().numpy().tobytes() for x in data)).hexdigest()
        self.amp = args.amp and gains_by_bfloat16(device)
        self.progress = tqdm(disable=True)
        self.model = model.to(device, memory_format=torch.channels_last)
        for name, labels in (('smallest', self.labels.min()), ('largest', self.labels.max())):
            if not 0 <= labels < self.model.num_classes:
                raise ValueError(f'{name} label {int(labels)}: {args.model} has {self.model.num_classes} classes')
        sizes: Dict[str, Any] = dict(
            model=[None], img_sizes=args.img_sizes.values(), hardest_half=args.hardest_half.values())
        for name in sizes:  # now, not in the epoch that a size begins with
            with as_value_error(f'{name}={getattr(args, name)!r}'), torch.no_grad():
                for size in sizes[name]:
                    self.model.eval()(at_size(self.images[:1] / 255, size))
        side = min(self.images.shape[-2:])
        if args.crop_padding_mode == 'reflect' and (args.crop_padding or 0) >= side:
            raise ValueError(f'crop_padding={args.crop_padding}: needs less than the {side} pixels that it mirrors')
        self.augment = Augment(args, self.model, device)
        if args.stem_whitening is not None:
            self.whiten_stem()
        self.teacher: Optional[DistillationTeacher] = None
        if args.kd_model_name is not None:
            with as_value_error(f'kd_model_name={args.kd_model_name!r}'):
                self.teacher = DistillationTeacher(
                    args.kd_model_name, self.model.num_classes, self.model.in_chans, device=device)
            if args.torchcompile:
                self.teacher.compile(args.torchcompile)
        with as_value_error(f'kd_maps={args.kd_maps}'):
            self.student = Student(self.model, self.teacher and self.teacher.model, args.kd_maps).to(device)
        self.forward: Any = self.student
        if args.torchcompile:  # a graph for each image size: one for any is slower
            with as_value_error(f'torchcompile={args.torchcompile!r}'):
                self.forward = torch.compile(self.student, backend=args.torchcompile, dynamic=False)
        self.mixup: Optional[Mixup] = None
        if args.mixup or args.cutmix:
            pairs = 4 if args.hardest_half else 2
            if args.batch_size % pairs:
                raise ValueError(
                    f'batch_size={args.batch_size}: mixup and cutmix mix pairs, so need a multiple of {pairs}')
            self.mixup = Mixup(
                args.mixup, args.cutmix, prob=args.mixup_prob, label_smoothing=args.smoothing,
                num_classes=self.model.num_classes)
        self.ema = ModelEmaV3(
            self.model, args.model_ema_decay, use_warmup=args.model_ema_warmup) if args.model_ema else None
        fused: Dict[str, Any] = dict(fused=True) if args.opt in FUSED else {}
        if (args.position_lr_scale, args.query_key_lr_scale) != (1., 1.):
            fused['param_group_fn'] = partial(
                scaled_groups, weight_decay=args.weight_decay, position_scale=args.position_lr_scale,
                query_key_scale=args.query_key_lr_scale)
        with as_value_error(f'opt={args.opt!r}'):
            self.optimizer = create_optimizer_v2(self.student, **optimizer_kwargs(args), **fused)
        if getattr(self.optimizer, 'is_second_order', False):
            raise ValueError(f'opt={args.opt!r}: needs second derivatives, which timm_selfconv.train does not take')
        patch_size = getattr(self.model, 'patch_size', None)  # rows and columns of the layers for images at full size
        self.grid = None if patch_size is None else [side // patch_size for side in self.images.shape[-2:]]
        self.history: List[Dict[str, Any]] = []
        self.start = self.heads()
        self.seconds = 0.

    def whiten_stem(self) -> None:
        """Begin with whitened patches, of 5,000 training images at the size of the first epoch."""
        args = self.args
        if args.initial_checkpoint or args.pretrained:
            raise ValueError(
                f'stem_whitening={args.stem_whitening}: needs a net from scratch, null leaves it out; pretrained is '
                f'{args.pretrained}, initial_checkpoint {args.initial_checkpoint!r}')
        images = at_size(self.augment.normalize(self.images[:5000]), args.img_sizes.get(0))
        with as_value_error(f'stem_whitening={args.stem_whitening}'):
            stem: Any = self.model.get_submodule(self.model.pretrained_cfg['first_conv'])
            whiten_stem(stem, images, args.stem_whitening)

    def heads(self) -> Optional[List[List[List[float]]]]:
        """Offsets and covariances of the heads, by layer, as :mod:`timm_selfconv.weights.history` has it."""
        layers = None if self.grid is None else position_blobs(self.result, (self.grid[0], self.grid[1]))
        return None if layers is None else [[
            [float(f'{x:.4g}') for x in (*center, covariance[0][0], covariance[1][1], covariance[0][1])]
            for center, covariance in zip(layer.centers.tolist(), layer.covariances.tolist())] for layer in layers]

    @property
    def result(self) -> nn.Module:
        """The net that is the result: the moving average if there is one."""
        return self.model if self.ema is None else self.ema.module

    def load(self, checkpoint: Dict[str, Any]) -> None:
        """Go on where a checkpoint was saved.

        Raises:
            ValueError: If it was made by another recipe, from other data or by another script, or is not finite.
        """
        if not isinstance(checkpoint, dict) or not {'args', 'steps', 'history', 'seconds'} <= checkpoint.keys():
            raise ValueError('has a checkpoint that timm_selfconv.train did not write; choose another')
        recorded = {**DEFAULTS, **checkpoint['args']}  # an older run has fewer keys
        differ = sorted(k for k, v in vars(self.args).items() if recorded[k] != v)
        if checkpoint.get('amp', recorded['amp']) != self.amp:
            differ.append('precision')
        if checkpoint['steps'] != self.steps:
            differ.append('batches')
        if checkpoint.get('data', self.fingerprint) != self.fingerprint:
            differ.append('training images')
        if differ:
            raise ValueError(f'has a run of another recipe ({differ} differ); choose another')
        broken = [name for name, value in checkpoint['state_dict'].items() if not value.isfinite().all()]
        if broken:
            raise ValueError(f'its last checkpoint has values in {broken[0]} that are not finite')
        self.model.load_state_dict(checkpoint['state_dict'])
        if self.ema is not None:
            self.ema.module.load_state_dict(checkpoint['state_dict_ema'])
        self.student.heads.load_state_dict(checkpoint.get('kd_heads', {}))
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        self.history, self.seconds = checkpoint['history'], checkpoint['seconds']
        self.start = checkpoint.get('start')

    def checkpoint(self) -> Dict[str, Any]:
        """Everything needed to resume, in the layout of timm's checkpoints."""
        ema = {} if self.ema is None else dict(state_dict_ema=self.ema.module.state_dict())
        return dict(
            epoch=len(self.history) - 1, arch=self.args.model, version=2, args=vars(self.args), amp=self.amp,
            steps=self.steps, data=self.fingerprint, state_dict=self.model.state_dict(), **ema,
            kd_heads=self.student.heads.state_dict(), optimizer=self.optimizer.state_dict(), history=self.history,
            start=self.start, seconds=self.seconds)

    def resume(self, output: Path) -> None:
        """Go on with the run in a folder, if there is one: from its newest checkpoint that is whole.

        Raises:
            ValueError: If there are checkpoints but none is whole, or they are of another training.
        """
        last = output / 'last.pth.tar'
        paths = [path for path in (last, *reversed(older_checkpoints(output))) if path.is_file()]
        for path in paths:
            try:
                with zipfile.ZipFile(path) as records:  # torch.load reads past flipped bits
                    if records.testzip() is not None:
                        raise ValueError('checksum')
                checkpoint = torch.load(path, map_location=self.images.device, weights_only=True)
            except Exception as e:  # what is raised depends on where the file ends
                print(f'{path} is damaged ({type(e).__name__})', flush=True)
                continue
            with as_value_error(f'output={str(output)!r}'):
                self.load(checkpoint)
            os.replace(path, last)
            return
        if paths:
            raise ValueError(f'output={str(output)!r}: no checkpoint in it is whole; choose another')

    def save(self, output: Path) -> None:
        """Write last.pth.tar; the last ones before it stay, ``checkpoint_hist`` in all."""
        last = output / 'last.pth.tar'
        if last.is_file():
            older = output / f'checkpoint-{len(self.history) - 2}.pth.tar'
            replace_file(older, lambda path: shutil.copyfile(last, path))
        replace_file(last, lambda path: torch.save(self.checkpoint(), path))
        for path in older_checkpoints(output)[:1 - self.args.checkpoint_hist or None]:
            path.unlink()

    def loss(self, x: torch.Tensor, target: torch.Tensor, size: Optional[int]) -> torch.Tensor:
        """Loss of augmented images, resized for the net but not for its teacher, and their labels."""
        args, smoothing = self.args, self.args.smoothing
        if self.mixup is not None:
            (x, target), smoothing = self.mixup(x, target), 0.  # it smooths labels itself
        logits, maps = self.forward(at_size(x, size))
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            x = self.teacher.normalize_input(at_size(x, None), self.augment.mean, self.augment.std)
            wanted, hints = logits_and_maps(self.teacher.model, x, self.student.stages)
        task, distill = args.task_loss_weight, args.distill_loss_weight  # what is not given: as timm's tasks
        task, distill = (1. if task is None else task), (1. - (task or 0.) if distill is None else distill)
        loss = task * loss + distill * distillation_loss(logits, wanted, args.kd_temperature)
        return loss + args.kd_maps_weight * map_loss(maps, hints) if maps else loss

    @torch.no_grad()
    def hardest_half(self, x: torch.Tensor, target: torch.Tensor, size: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """The half of a batch whose loss is highest at a small size (selective backprop, arXiv:1910.00762)."""
        self.model.eval()  # running statistics are those of what is trained on
        # in a context of its own: older torches keep its copies of weights, which have no gradients
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            logits, _ = self.forward(at_size(x, size))
        self.model.train()
        chosen = F.cross_entropy(logits.float(), target, reduction='none').topk(len(x) - len(x) // 2).indices
        return x[chosen], target[chosen]

    def epoch(self, scheduler: Any) -> float:
        """Train on the shuffled images once, the last broken batch left out; returns the mean loss.

        Raises:
            FloatingPointError: At the first loss that is not finite.
        """
        args, epoch, device = self.args, len(self.history), self.images.device
        random_seed(args.seed, 1000 * (epoch + 1))  # a resumed run draws what it would have drawn
        order = torch.randperm(len(self.images), device=device)[:self.batches * args.batch_size]
        batches = order.split(args.batch_size)
        losses = torch.zeros(self.steps, device=device)
        look = 1 if device.type == 'cpu' else 100  # reading a loss waits for the device
        size, glance = size_of_epoch(args.img_sizes, epoch), size_of_epoch(args.hardest_half, epoch)
        if self.mixup is not None:
            self.mixup.mixup_enabled = not 0 < args.mixup_off_epoch <= epoch
        self.model.train()
        for step in range(self.steps):
            group = batches[step * args.grad_accum_steps:(step + 1) * args.grad_accum_steps]
            self.optimizer.zero_grad()
            for chosen in group:
                x, target = self.augment(self.images[chosen]), self.labels[chosen]
                if glance is not None:
                    x, target = self.hardest_half(x, target, glance)
                with torch.autocast(device.type, torch.bfloat16, enabled=self.amp):
                    loss = self.loss(x, target, size) / len(group)
                loss.backward()
                losses[step] += loss.detach()
            if (step + 1) % look == 0 or step + 1 == self.steps:
                bad = (~losses.isfinite()).nonzero()
                if len(bad):
                    raise FloatingPointError(f'epoch {epoch}, step {int(bad[0])}: the loss is {losses[bad[0]].item()}')
            if args.clip_grad is not None:
                nn.utils.clip_grad_norm_(self.student.parameters(), args.clip_grad)
            with nullcontext() if self.amp else muon_in_float32():
                self.optimizer.step()
            updates = epoch * self.steps + step + 1
            if self.ema is not None:
                self.ema.update(self.model, step=updates)
            scheduler.step_update(updates)
            self.progress.update()
        scheduler.step(epoch + 1)
        return float(losses.mean())

    def validate(self, data: Images) -> Dict[str, float]:
        """Mean loss, and top-1 and top-5 accuracy in percent, in eval mode."""
        images, labels = data
        self.result.eval()
        with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=self.amp):
            logits = torch.cat([self.result(self.augment.normalize(x)) for x in images.split(500)]).float()
        hit = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        return dict(
            eval_loss=float(F.cross_entropy(logits, labels)),
            eval_top1=100 * int(hit[:, 0].sum()) / len(hit), eval_top5=100 * int(hit.any(1).sum()) / len(hit))

    def run(self, validation: Images, output: Path) -> None:
        """Train to the end of the recipe, with a checkpoint and a line of the summary after each epoch."""
        scheduler, epochs = create_scheduler_v2(
            self.optimizer, **scheduler_kwargs(self.args), updates_per_epoch=self.steps)
        scheduler.step_update(len(self.history) * self.steps)
        scheduler.step(len(self.history))
        if self.args.amp and not self.amp:
            print('trains in float32: this CPU is slower in bfloat16', flush=True)
        if self.history:  # the last run may have been killed between its checkpoint and these
            self.publish(output)
        steps, done = epochs * self.steps, len(self.history) * self.steps
        with tqdm(total=steps, initial=done, unit='step', leave=False, disable=None) as self.progress:
            while len(self.history) < epochs:
                start = time.perf_counter()
                row: Dict[str, Any] = dict(epoch=len(self.history), train_loss=self.epoch(scheduler))
                speed = self.batches * self.args.batch_size / (time.perf_counter() - start)
                if (row['epoch'] + 1) % self.args.val_interval == 0 or row['epoch'] + 1 == epochs:
                    row.update(self.validate(validation))
                self.seconds += time.perf_counter() - start
                row['lr'] = self.optimizer.param_groups[0]['lr']
                with tqdm.external_write_mode():
                    print(' '.join(f'{k} {v:.5g}' for k, v in row.items()), f'{self.seconds:.0f} s', flush=True)
                self.history.append(dict(row, images_per_second=round(speed, 1), heads=self.heads()))
                self.save(output)
                self.publish(output)

    def publish(self, output: Path) -> None:
        """Write summary and history, which are derived from the last checkpoint."""
        rows = [dict(epochs=0, heads=self.start)]
        for row in self.history:
            rows.append({'epochs': (row['epoch'] + 1) * self.share, **{key: row[key] for key in row if key != 'epoch'}})
        replace_file(output / 'summary.csv', lambda path: write_summary(path, self.history))
        write_history(output / HISTORY, self.args.model, self.grid, rows)


def older_checkpoints(output: Path) -> List[Path]:
    """The checkpoints in a folder before the last, in order of epochs."""
    return sorted(output.glob('checkpoint-*.pth.tar'), key=lambda path: int(re.sub(r'\D', '', path.name) or -1))


def write_summary(path: Path, history: List[Dict[str, Any]]) -> None:
    """Write the summary.csv of timm's train.py; an epoch that was not validated (val_interval) has gaps."""
    columns = ('epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr')
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, fieldnames=columns, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(history)
