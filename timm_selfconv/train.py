"""Train a net of the zoo as fast as one device allows, by the same recipe that timm's train.py takes.

    python -m timm_selfconv.train recipes/paper.yaml model=sa_learned_cifar --output runs/learned
    python -m timm_selfconv.train recipes/paper.yaml model=sa_learned_cifar --output runs/fast batch_size=512 lr=0.512

train.py is the reference. What differs here: all images lie on the device as uint8 and are cropped and flipped there,
the optimiser is fused and a GPU runs the net compiled, so nothing waits for a data loader. KEY=VALUE replaces a key of
the recipe (YAML; null removes it). A key that this script does not know stops it, so no part of a recipe is left out in
silence. Four keys are for this script alone: `crop_padding`, the papers' random crop of the image padded with black,
which train.py ignores (timm has none) in favour of `scale` and `ratio`; `img_sizes`, what images are shrunk to last,
from which epoch on: {0: 16, 10: 24, 20: 32} begins with 16 x 16 pixels, a quarter of the work; `kd_maps`, which layers
learn the maps of which of the teacher's stages, both from 0, and `kd_maps_weight`, how much that counts. A teacher
(`kd_model_name`) sees the same crops at full size.

OUTPUT gets last.pth.tar after each epoch (timm's layout), previous.pth.tar, the one before it, and summary.csv (timm's
columns). Stop the script at any moment and start it again with the same arguments: it goes on after the last whole
epoch and ends with the weights that it would have had. It tells how to export them. Nothing is chosen by test accuracy:
the last weights count, or their average (`model_ema`) if the recipe keeps one. To tune a recipe, hold images out of the
training split: train_split='train[:45000]' val_split='train[45000:]'.
"""
import argparse
import csv
import hashlib
import importlib
import io
import math
import os
import shlex
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from filelock import FileLock, Timeout
from timm.data import Mixup, resolve_data_config
from timm.data.random_erasing import RandomErasing
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.task import DistillationTeacher
from timm.utils import ModelEmaV3, random_seed

from timm_selfconv.data import Images, at_size, load_images, padded_crop, random_resized_crop
from timm_selfconv.distillation import Student, distillation_loss, logits_and_maps, map_loss
from timm_selfconv.files import replace_file
from timm_selfconv.hub import save_shards
from timm_selfconv.recipe_files import DEFAULTS, read_recipe

__all__ = ['Augment', 'Training', 'export_command', 'summary']

FUSED = ('sgd', 'momentum', 'adam', 'adamw')


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


def made(what: str, make: Callable[[], Any]) -> Any:
    """What a factory makes; its errors are the user's, in one line."""
    try:
        return make()
    except (RuntimeError, TypeError, ValueError, OSError) as e:
        raise ValueError(f"{what}: {' '.join(str(e).split()) or type(e).__name__}") from e


class Training:
    """A net and all that changes while it trains."""

    def __init__(self, args: argparse.Namespace, data: Images, batches: Optional[int] = None):
        """
        Args:
            args: The recipe.
            data: Training images and labels, on the device to train on.
            batches: How many an epoch; all that are whole if None.

        Raises:
            ValueError: If the recipe and the data don't fit each other or the net, or there is no such net.
        """
        self.args = args
        self.images, self.labels = data
        device = self.images.device
        self.batches = min(len(self.images) // args.batch_size, batches or len(self.images))
        if not self.batches:
            raise ValueError(f'batch_size={args.batch_size}: needs at most the {len(self.images)} training images')
        self.steps = math.ceil(self.batches / args.grad_accum_steps)
        self.fingerprint = hashlib.sha256(b''.join(x.cpu().numpy().tobytes() for x in data)).hexdigest()
        random_seed(args.seed)
        what = f'model={args.model!r}, initial_checkpoint={args.initial_checkpoint!r}'
        model: Any = made(what, lambda: timm.create_model(
            args.model, checkpoint_path=args.initial_checkpoint, drop_rate=args.drop, drop_path_rate=args.drop_path,
            **args.model_kwargs).to(device))
        self.model = model.to(memory_format=torch.channels_last)
        for name, labels in (('smallest', self.labels.min()), ('largest', self.labels.max())):
            if not 0 <= labels < self.model.num_classes:
                raise ValueError(f'{name} label {int(labels)}: {args.model} has {self.model.num_classes} classes')
        for size in args.img_sizes.values():  # now, not in the epoch that it begins with
            with torch.no_grad():
                made(what, partial(self.model.eval(), at_size(self.images[:1] / 255, size)))
        self.augment = Augment(args, self.model, device)
        self.teacher: Optional[DistillationTeacher] = None
        if args.kd_model_name is not None:
            self.teacher = made(f'kd_model_name={args.kd_model_name!r}', lambda: DistillationTeacher(
                args.kd_model_name, self.model.num_classes, self.model.in_chans, device=device))
            if args.torchcompile:
                self.teacher.compile(args.torchcompile)
        teacher = self.teacher and self.teacher.model
        self.student = made(f'kd_maps={args.kd_maps}', lambda: Student(self.model, teacher, args.kd_maps).to(device))
        self.forward = torch.compile(self.student, backend=args.torchcompile) if args.torchcompile else self.student
        self.mixup = Mixup(
            args.mixup, args.cutmix, prob=args.mixup_prob, label_smoothing=args.smoothing,
            num_classes=self.model.num_classes) if args.mixup or args.cutmix else None
        self.ema = ModelEmaV3(
            self.model, args.model_ema_decay, use_warmup=args.model_ema_warmup) if args.model_ema else None
        fused: Dict[str, Any] = dict(fused=True) if args.opt in FUSED else {}
        self.optimizer = create_optimizer_v2(self.student, **optimizer_kwargs(args), **fused)
        self.history: List[Dict[str, float]] = []
        self.seconds = 0.

    @property
    def result(self) -> nn.Module:
        """The net that counts in the end."""
        return self.model if self.ema is None else self.ema.module

    def load(self, checkpoint: Dict[str, Any]) -> None:
        """Go on where a checkpoint was saved.

        Raises:
            ValueError: If it was made by another recipe or from other data.
        """
        recorded = {**DEFAULTS, **checkpoint['args']}  # an older run knows fewer keys
        differ = sorted(k for k, v in vars(self.args).items() if recorded[k] != v)
        if checkpoint['steps'] != self.steps:
            differ.append('batches')
        if checkpoint.get('data', self.fingerprint) != self.fingerprint:
            differ.append('training images')
        if differ:
            raise ValueError(f'output: has a run of another recipe ({differ} differ); choose another')
        self.model.load_state_dict(checkpoint['state_dict'])
        if self.ema is not None:
            self.ema.module.load_state_dict(checkpoint['state_dict_ema'])
        self.student.heads.load_state_dict(checkpoint.get('kd_heads', {}))
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        self.history, self.seconds = checkpoint['history'], checkpoint['seconds']

    def checkpoint(self) -> Dict[str, Any]:
        """All there is, in the layout of timm's checkpoints."""
        ema = {} if self.ema is None else dict(state_dict_ema=self.ema.module.state_dict())
        return dict(
            epoch=len(self.history) - 1, arch=self.args.model, version=2, args=vars(self.args), steps=self.steps,
            data=self.fingerprint, state_dict=self.model.state_dict(), **ema,
            kd_heads=self.student.heads.state_dict(), optimizer=self.optimizer.state_dict(), history=self.history,
            seconds=self.seconds)

    def resume(self, output: Path) -> None:
        """Go on with the run in a folder, if there is one: from its last checkpoint that is whole.

        Raises:
            ValueError: If there are checkpoints but none is whole, or they are of another training.
        """
        last, previous = output / 'last.pth.tar', output / 'previous.pth.tar'
        for path in filter(Path.is_file, (last, previous)):
            try:
                checkpoint = torch.load(path, map_location=self.images.device, weights_only=True)
            except Exception as e:  # what is raised depends on where the file ends
                print(f'{path} is damaged ({type(e).__name__})', flush=True)
                continue
            self.load(checkpoint)
            os.replace(path, last)
            return
        if last.exists():
            raise ValueError(f'output={str(output)!r}: no checkpoint in it is whole; choose another')

    def loss(self, x: torch.Tensor, target: torch.Tensor, size: Optional[int]) -> torch.Tensor:
        """Of augmented images, which the net sees at a size and its teacher as they are, and their labels."""
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
        size = next((args.img_sizes[start] for start in sorted(args.img_sizes, reverse=True) if start <= epoch), None)
        self.model.train()
        for step in range(self.steps):
            group = batches[step * args.grad_accum_steps:(step + 1) * args.grad_accum_steps]
            self.optimizer.zero_grad()
            for chosen in group:
                x = self.augment(self.images[chosen])
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                    loss = self.loss(x, self.labels[chosen], size) / len(group)
                loss.backward()
                losses[step] += loss.detach()
            if (step + 1) % look == 0 or step + 1 == self.steps:
                bad = (~losses.isfinite()).nonzero()
                if len(bad):
                    raise FloatingPointError(f'epoch {epoch}, step {int(bad[0])}: the loss is {losses[bad[0]].item()}')
            if args.clip_grad is not None:
                nn.utils.clip_grad_norm_(self.student.parameters(), args.clip_grad)
            self.optimizer.step()
            updates = epoch * self.steps + step + 1
            if self.ema is not None:
                self.ema.update(self.model, step=updates)
            scheduler.step_update(updates)
        scheduler.step(epoch + 1)
        return float(losses.mean())

    def validate(self, data: Images) -> Dict[str, float]:
        """Mean loss, and top-1 and top-5 accuracy in percent, in eval mode."""
        images, labels = data
        self.result.eval()
        with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=self.args.amp):
            logits = torch.cat([self.result(self.augment.normalize(x)) for x in images.split(500)]).float()
        hit = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        return dict(
            eval_loss=float(F.cross_entropy(logits, labels)),
            eval_top1=100 * float(hit[:, 0].double().mean()), eval_top5=100 * float(hit.any(1).double().mean()))

    def run(self, validation: Images, output: Path, shards: Optional[Path] = None) -> None:
        """Train to the end of the recipe, with a checkpoint, a line of the summary and shards after each epoch."""
        scheduler, epochs = create_scheduler_v2(
            self.optimizer, **scheduler_kwargs(self.args), updates_per_epoch=self.steps)
        scheduler.step_update(len(self.history) * self.steps)
        scheduler.step(len(self.history))
        if self.history:  # the last run may have been killed between its checkpoint and these
            self.publish(output, shards)
        last = output / 'last.pth.tar'
        while len(self.history) < epochs:
            start = time.perf_counter()
            row = dict(epoch=len(self.history), train_loss=self.epoch(scheduler))
            if (row['epoch'] + 1) % self.args.val_interval == 0 or row['epoch'] + 1 == epochs:
                row.update(self.validate(validation))
            self.seconds += time.perf_counter() - start
            self.history.append(dict(row, lr=self.optimizer.param_groups[0]['lr']))
            print(' '.join(f'{k} {v:.5g}' for k, v in self.history[-1].items()), f'{self.seconds:.0f} s', flush=True)
            if last.is_file():
                replace_file(output / 'previous.pth.tar', lambda path: shutil.copyfile(last, path))
            replace_file(last, lambda path: torch.save(self.checkpoint(), path))
            self.publish(output, shards)

    def publish(self, output: Path, shards: Optional[Path]) -> None:
        """Write what follows from the last checkpoint: the summary, and shards if asked for."""
        for folder in filter(None, (output, shards)):
            replace_file(folder / 'summary.csv', lambda path: path.write_text(summary(self.history)))
        if shards is not None:
            save_shards(self.result, shards / self.args.model)


def summary(history: List[Dict[str, float]]) -> str:
    """The file that timm's train.py calls summary.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=max(history, key=len))  # not every epoch is validated (val_interval)
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def export_command(training: Training, options: argparse.Namespace, data: str) -> str:
    """The command that makes a weight file and its model card of a run."""
    args, device = training.args, training.images.device
    threads, epochs, batches = torch.get_num_threads(), len(training.history), training.batches
    overrides, seen = options.overrides, epochs * batches * args.batch_size
    whole = batches == len(training.images) // args.batch_size
    facts = {
        'recipe': options.recipe,
        'script': 'python -m timm_selfconv.train',
        'arguments': ' '.join(overrides if whole else [*overrides, f'--batches {batches}']) or 'none',
        'epochs': epochs if whole else f'{seen / len(training.images):.1f}',
        'images': None if whole else f'{seen:,}: {epochs} x {batches} batches of {args.batch_size}',
        'image sizes': ', '.join(f'{size} px from epoch {start}' for start, size in sorted(args.img_sizes.items())),
        'initialised from': args.initial_checkpoint,
        'teacher': args.kd_model_name,
        'weights': 'the last' if training.ema is None else f'moving average, decay {args.model_ema_decay}',
        'seed': args.seed,
        'precision': f"trained {'under bfloat16 autocast' if args.amp else 'in float32'}, stored as float16",
        'hardware': torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU, {threads} thread(s)',
        'time': f'{training.seconds / 60:.0f} minutes',
        'data': f'{args.dataset}, split {args.train_split}',
    }
    return shlex.join([
        'timm-selfconv', 'export', args.model, '--checkpoint', str(options.output / 'last.pth.tar'), '--data', data,
        '--output', 'timm_selfconv/weights',
        *(word for key, value in facts.items() if value not in (None, '') for word in ('--fact', f'{key}={value}'))])


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recipe', help="YAML file, or the name of one of the package's, e.g. paper")
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='replaces a key of the recipe')
    parser.add_argument('--output', required=True, type=Path, metavar='DIR', help='checkpoint and summary')
    parser.add_argument('--data', help="folder or timm dataset name (default: the recipe's)")
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--batches', type=int, metavar='N', help='batches an epoch, for a rehearsal (default: all)')
    parser.add_argument(
        '--shards', type=Path, metavar='DIR',
        help='put the weights there too, after each epoch, as float16 safetensors of less than 16 MiB, and the summary')
    options = parser.parse_intermixed_args(argv)
    try:
        args = read_recipe(options.recipe, options.overrides)
        for module in args.device_modules:
            importlib.import_module(module)
        device = made(f'device={options.device!r}', lambda: torch.zeros(1, device=options.device)).device
        if args.torchcompile is None and device.type == 'cuda':
            args.torchcompile = 'inductor'
        data = options.data or args.dataset
        columns = (args.input_key, args.target_key, device)
        training = Training(args, load_images(data, args.train_split, *columns), options.batches)
        validation = load_images(data, args.val_split, *columns)
        options.output.mkdir(parents=True, exist_ok=True)
        with FileLock(options.output / '.lock', timeout=0):  # the system's: a kill frees it
            training.resume(options.output)
            training.run(validation, options.output, options.shards)
    except Timeout:
        parser.exit(2, f'timm_selfconv.train: output={str(options.output)!r}: another training runs there\n')
    except FloatingPointError as e:
        parser.exit(1, f'timm_selfconv.train: {e}; {options.output} keeps the epochs before\n')
    except (ValueError, OSError) as e:
        parser.exit(2, f'timm_selfconv.train: {e}\n')
    print(export_command(training, options, data))


if __name__ == '__main__':
    main()
