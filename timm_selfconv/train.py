"""Train a net of the zoo as fast as one device allows, by the same recipe that timm's train.py takes.

    python -m timm_selfconv.train recipes/paper.yaml model=sa_learned_cifar --output runs/learned
    python -m timm_selfconv.train recipes/paper.yaml model=sa_learned_cifar --output runs/fast batch_size=512 lr=0.512

train.py is the reference. What differs here: all images lie on the device as uint8 and are cropped and flipped there,
the optimiser is fused and a GPU runs the net compiled, so nothing waits for a data loader. KEY=VALUE replaces a key of
the recipe (YAML; null removes it). A key that this script does not know stops it, so no part of a recipe is left out in
silence. Two keys are for this script alone: `crop_padding`, the papers' random crop of the image padded with black,
which train.py ignores (timm has none) in favour of `scale` and `ratio`; and `img_sizes`, what images are resized to
after the crop, from which epoch on: {0: 16, 10: 24, 20: 32} begins with 16 x 16 pixels, a quarter of the work.

OUTPUT gets last.pth.tar after each epoch (timm's layout) and summary.csv (timm's columns). Stop the script at any
moment and start it again with the same arguments: it goes on after the last whole epoch and ends with the weights that
it would have had. It tells how to export them. Nothing is chosen by test accuracy: the last weights count, or their
average (`model_ema`) if the recipe keeps one. To tune a recipe, hold images out of the training split:
train_split='train[:45000]' val_split='train[45000:]'.
"""
import argparse
import csv
import importlib
import io
import math
import shlex
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from timm.data import Mixup, resolve_data_config
from timm.data.random_erasing import RandomErasing
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import ModelEmaV3, random_seed
from tqdm import trange

from timm_selfconv.data import open_dataset
from timm_selfconv.files import replace_file
from timm_selfconv.hub import save_shards

# what train.py takes where a recipe is silent, of the keys that this script honours
DEFAULTS: Dict[str, Any] = dict(
    model=None, model_kwargs={}, initial_checkpoint='', dataset='', input_key='img', target_key='label',
    train_split='train', val_split='validation', device_modules=[], epochs=300, batch_size=128, opt='sgd',
    opt_eps=None, opt_betas=None, momentum=0.9, lr=None, weight_decay=2e-5, clip_grad=None, sched='cosine',
    sched_on_updates=False, warmup_epochs=5, warmup_lr=1e-5, warmup_prefix=False, min_lr=0.,
    decay_milestones=[90, 180, 270], decay_rate=0.1, amp=False, amp_dtype='float16', torchcompile=None,
    val_interval=1, model_ema=False, model_ema_decay=0.9998, model_ema_warmup=False, crop_padding=None, img_sizes={},
    scale=[0.08, 1.], ratio=[3 / 4, 4 / 3], train_interpolation='bilinear', hflip=0.5, color_jitter=0.4, reprob=0.,
    mixup=0., cutmix=0., mixup_prob=1., smoothing=0.1, drop=0., drop_path=None, seed=42, checkpoint_hist=None)
FUSED = ('sgd', 'momentum', 'adam', 'adamw')
Images = Tuple[torch.Tensor, torch.Tensor]  # uint8, shape (N, C, H, W), and their labels, shape (N,)


def read_recipe(path: str, overrides: Sequence[str] = ()) -> argparse.Namespace:
    """A recipe with KEY=VALUE replacements, complete, as timm's factories take it.

    Raises:
        ValueError: If there is no such recipe, or it asks for what this script does not do.
    """
    if not Path(path).is_file():
        raise ValueError(f'recipe={path!r}: needs a YAML file')
    recipe = yaml.safe_load(Path(path).read_text())
    for override in overrides:
        key, equals, value = override.partition('=')
        if not equals:
            raise ValueError(f'override={override!r}: needs KEY=VALUE')
        recipe[key] = yaml.safe_load(value)
    recipe = {key: value for key, value in recipe.items() if value is not None}
    unknown = sorted(set(recipe) - set(DEFAULTS))
    if unknown:
        raise ValueError(f'recipe={path!r}: train.py does not do {unknown}; {unknown[0]}=null leaves it out')
    args = argparse.Namespace(**{**DEFAULTS, **recipe})
    for key, wanted in (('amp_dtype', 'bfloat16'), ('color_jitter', 0)):
        if getattr(args, key) != wanted and not (key == 'amp_dtype' and not args.amp):
            raise ValueError(f'{key}={getattr(args, key)!r}: timm_selfconv.train needs {wanted}')
    if args.train_interpolation not in ('bilinear', 'bicubic'):
        raise ValueError(f"train_interpolation={args.train_interpolation!r}: needs 'bilinear' or 'bicubic'")
    if args.lr is None:
        raise ValueError('lr=None: needs a learning rate')
    numbers = [*args.img_sizes, *args.img_sizes.values()] if isinstance(args.img_sizes, dict) else [None]
    if not all(isinstance(x, int) and x >= 0 for x in numbers):
        raise ValueError(f'img_sizes={args.img_sizes!r}: needs a size in pixels by the epoch that it begins with')
    return args


def load_images(data: str, split: str, input_key: str, target_key: str, device: torch.device) -> Images:
    """A whole split on the device.

    Raises:
        ValueError: If there is no such dataset, or its images are not of one size.
    """
    dataset = open_dataset(data, split, None, input_key, target_key)
    rows = (dataset[i] for i in trange(len(dataset), desc=split, leave=False))
    pixels, labels = zip(*((np.asarray(image), label) for image, label in rows))
    shapes = {image.shape for image in pixels}
    if len(shapes) > 1:
        raise ValueError(f'data={data!r}: needs images of one size, has {sorted(shapes)[:3]}')
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    return images.contiguous().to(device), torch.tensor(labels, device=device)


def padded_crop(x: torch.Tensor, padding: int) -> torch.Tensor:
    """Crop each image, shape (B, C, H, W), at a place of its own out of itself with a black margin, in pixels."""
    batch, channels, height, width = x.shape
    x = F.pad(x, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, batch, 1), device=x.device)
    rows = top + torch.arange(height, device=x.device)
    cols = left + torch.arange(width, device=x.device)
    b, c = torch.arange(batch, device=x.device), torch.arange(channels, device=x.device)
    return x[b[:, None, None, None], c[:, None, None], rows[:, None, :, None], cols[:, None, None, :]]


def random_resized_crop(
        x: torch.Tensor, scale: Sequence[float], ratio: Sequence[float], interpolation: str) -> torch.Tensor:
    """Zoom a window of each image to the whole, as timm's RandomResizedCropAndInterpolation.

    Args:
        x: Images, floating point, shape (B, C, H, W).
        scale: Smallest and largest part of the image's area.
        ratio: Smallest and largest width divided by height.
        interpolation: 'bilinear' or 'bicubic'.
    """
    batch, _, height, width = x.shape
    draws = torch.rand(2, 10, batch, device=x.device)  # like timm: the first of ten that fits
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[0])
    aspect = torch.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[1])
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    first = ((w <= width) & (h <= height)).int().argmax(0, keepdim=True)
    w, h = w.gather(0, first)[0].clamp(1, width), h.gather(0, first)[0].clamp(1, height)
    corner = torch.rand(2, batch, device=x.device)
    top, left = (corner[0] * (height - h + 1)).floor(), (corner[1] * (width - w + 1)).floor()
    theta = x.new_zeros(batch, 2, 3)  # output to input coordinates, both from -1 to 1
    theta[:, 0, 0], theta[:, 0, 2] = w / width, (2 * left + w) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = h / height, (2 * top + h) / height - 1
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode=interpolation, padding_mode='border', align_corners=False)


class Augment:
    """From uint8 images, shape (B, C, H, W), to what the net sees, on their device."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        config = resolve_data_config({}, model=model)
        self.args = args
        self.mean, self.std = (torch.tensor(config[k], device=device).view(-1, 1, 1) for k in ('mean', 'std'))
        self.erase = RandomErasing(args.reprob, mode='pixel', device=str(device)) if args.reprob else nn.Identity()

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 255 - self.mean) / self.std

    def __call__(self, x: torch.Tensor, size: Optional[int] = None) -> torch.Tensor:
        """Crop, resize to a size in pixels if one is given, flip, normalise, erase."""
        if self.args.crop_padding is not None:
            x = padded_crop(x, self.args.crop_padding)
        else:
            x = random_resized_crop(x.float(), self.args.scale, self.args.ratio, self.args.train_interpolation)
        if size is not None and size != x.shape[-1]:
            x = F.interpolate(x.float(), (size, size), mode='bilinear', antialias=True)
        flip = torch.rand(len(x), 1, 1, 1, device=x.device) < self.args.hflip
        x = torch.where(flip, x.flip(3), x)
        return self.erase(self.normalize(x)).contiguous(memory_format=torch.channels_last)


class Training:
    """A net and all that changes while it trains."""

    def __init__(self, args: argparse.Namespace, data: Images, steps: Optional[int] = None):
        """
        Args:
            args: The recipe.
            data: Training images and labels, on the device to train on.
            steps: Batches an epoch; all that are whole if None.
        """
        self.args = args
        self.images, self.labels = data
        device = self.images.device
        self.steps = min(len(self.images) // args.batch_size, steps or len(self.images))
        if not self.steps:
            raise ValueError(f'batch_size={args.batch_size}: needs at most the {len(self.images)} training images')
        random_seed(args.seed)
        model: Any = timm.create_model(
            args.model, checkpoint_path=args.initial_checkpoint, drop_rate=args.drop, drop_path_rate=args.drop_path,
            **args.model_kwargs).to(device)
        self.model = model.to(memory_format=torch.channels_last)
        for name, labels in (('smallest', self.labels.min()), ('largest', self.labels.max())):
            if not 0 <= labels < self.model.num_classes:
                raise ValueError(f'{name} label {int(labels)}: {args.model} has {self.model.num_classes} classes')
        self.augment = Augment(args, self.model, device)
        self.forward = torch.compile(self.model, backend=args.torchcompile) if args.torchcompile else self.model
        self.mixup = Mixup(
            args.mixup, args.cutmix, prob=args.mixup_prob, label_smoothing=args.smoothing,
            num_classes=self.model.num_classes) if args.mixup or args.cutmix else None
        self.ema = ModelEmaV3(
            self.model, args.model_ema_decay, use_warmup=args.model_ema_warmup) if args.model_ema else None
        fused: Dict[str, Any] = dict(fused=True) if args.opt in FUSED else {}
        self.optimizer = create_optimizer_v2(self.model, **optimizer_kwargs(args), **fused)
        self.history: List[Dict[str, float]] = []
        self.seconds = 0.

    @property
    def result(self) -> nn.Module:
        """The net that counts in the end."""
        return self.model if self.ema is None else self.ema.module

    def load(self, checkpoint: Dict[str, Any]) -> None:
        """Go on where a checkpoint was saved.

        Raises:
            ValueError: If it was made by another recipe.
        """
        differ = sorted(k for k, v in vars(self.args).items() if checkpoint['args'].get(k) != v)
        if differ or checkpoint['steps'] != self.steps:
            raise ValueError(f'output: has a run of another recipe ({differ or ["batches"]} differ); choose another')
        self.model.load_state_dict(checkpoint['state_dict'])
        if self.ema is not None:
            self.ema.module.load_state_dict(checkpoint['state_dict_ema'])
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        self.history, self.seconds = checkpoint['history'], checkpoint['seconds']

    def checkpoint(self) -> Dict[str, Any]:
        """All there is, in the layout of timm's checkpoints."""
        ema = {} if self.ema is None else dict(state_dict_ema=self.ema.module.state_dict())
        return dict(
            epoch=len(self.history) - 1, arch=self.args.model, version=2, args=vars(self.args), steps=self.steps,
            state_dict=self.model.state_dict(), **ema, optimizer=self.optimizer.state_dict(),
            history=self.history, seconds=self.seconds)

    def epoch(self, scheduler: Any) -> float:
        """Train on the shuffled images once, the last broken batch left out; returns the mean loss."""
        args, epoch = self.args, len(self.history)
        random_seed(args.seed, 1000 * (epoch + 1))  # a resumed run draws what it would have drawn
        order = torch.randperm(len(self.images), device=self.images.device)
        total = torch.zeros((), device=self.images.device)  # read once an epoch: reading waits for the device
        parameters = list(self.model.parameters())
        size = next((args.img_sizes[start] for start in sorted(args.img_sizes, reverse=True) if start <= epoch), None)
        self.model.train()
        for step in range(self.steps):
            chosen = order[step * args.batch_size:(step + 1) * args.batch_size]
            x, target, smoothing = self.augment(self.images[chosen], size), self.labels[chosen], args.smoothing
            if self.mixup is not None:
                (x, target), smoothing = self.mixup(x, target), 0.  # it smooths labels itself
            with torch.autocast(x.device.type, torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(self.forward(x), target, label_smoothing=smoothing)
            self.optimizer.zero_grad()
            loss.backward()
            if args.clip_grad is not None:
                nn.utils.clip_grad_norm_(parameters, args.clip_grad)
            self.optimizer.step()
            total += loss.detach()
            updates = epoch * self.steps + step + 1
            if self.ema is not None:
                self.ema.update(self.model, step=updates)
            scheduler.step_update(updates)
        scheduler.step(epoch + 1)
        return float(total) / self.steps

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
        while len(self.history) < epochs:
            start = time.perf_counter()
            row = dict(epoch=len(self.history), train_loss=self.epoch(scheduler))
            if (row['epoch'] + 1) % self.args.val_interval == 0 or row['epoch'] + 1 == epochs:
                row.update(self.validate(validation))
            self.seconds += time.perf_counter() - start
            self.history.append(dict(row, lr=self.optimizer.param_groups[0]['lr']))
            print(' '.join(f'{k} {v:.5g}' for k, v in self.history[-1].items()), f'{self.seconds:.0f} s', flush=True)
            replace_file(output / 'last.pth.tar', lambda path: torch.save(self.checkpoint(), path))
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
    threads = torch.get_num_threads()
    facts = {
        'recipe': options.recipe,
        'script': 'python -m timm_selfconv.train',
        'arguments': ' '.join(options.overrides) or 'none',
        'epochs': args.epochs,
        'weights': 'the last' if training.ema is None else f'moving average, decay {args.model_ema_decay}',
        'seed': args.seed,
        'precision': f"trained {'under bfloat16 autocast' if args.amp else 'in float32'}, stored as float16",
        'hardware': torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU, {threads} thread(s)',
        'time': f'{training.seconds / 60:.0f} minutes',
        'data': f'{args.dataset}, split {args.train_split}',
    }
    return shlex.join([
        'timm-selfconv', 'export', args.model, '--checkpoint', str(options.output / 'last.pth.tar'), '--data', data,
        '--output', 'timm_selfconv/weights', *(x for k, v in facts.items() for x in ('--fact', f'{k}={v}'))])


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recipe', help='YAML file')
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
        device = torch.device(options.device)
        if args.torchcompile is None and device.type == 'cuda':
            args.torchcompile = 'inductor'
        data = options.data or args.dataset
        columns = (args.input_key, args.target_key, device)
        training = Training(args, load_images(data, args.train_split, *columns), options.batches)
        for folder in filter(None, (options.output, options.shards)):
            folder.mkdir(parents=True, exist_ok=True)
        checkpoint = options.output / 'last.pth.tar'
        if checkpoint.is_file():
            training.load(torch.load(checkpoint, map_location=device, weights_only=True))
        training.run(load_images(data, args.val_split, *columns), options.output, options.shards)
    except ValueError as e:
        parser.exit(2, f'timm_selfconv.train: {e}\n')
    print(export_command(training, options, data))


if __name__ == '__main__':
    main()
