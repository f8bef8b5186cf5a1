"""Runs a training, and writes its net and card into the folder of the run, which timm loads."""
import argparse
import copy
import importlib
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import torch
from filelock import FileLock, Timeout

from timm_selfconv.data import PictureDataset, check_labels, class_names, data_name, load_images
from timm_selfconv.files import as_value_error, replace_file
from timm_selfconv.weights import card_facts, teachers
from timm_selfconv.weights.loading import WEIGHTS_FILE
from timm_selfconv.weights.saving import card_text, write_net
from .net import create_net
from .output import check_output
from .trainer import Training

__all__ = ['run_facts', 'save_net', 'train']


def train(
        args: argparse.Namespace, datasets: Sequence[PictureDataset], device: torch.device, output: Path,
        batches: Optional[int] = None,
) -> Training:
    """Train the model of a recipe (:func:`~timm_selfconv.training.recipes.read_recipe`), or resume the run in a folder.

    ``datasets`` are training and validation images (:func:`timm_selfconv.data.open_dataset`). ``batches`` counts the
    batches of an epoch, None for all full ones.

    Raises:
        ValueError: If recipe, data and folder do not fit together, or another training uses the folder.
        FileExistsError: If the folder is a file, or has files but no checkpoint.
        FloatingPointError: If a loss is not finite.
    """
    for module in args.device_modules:
        with as_value_error(f'device_modules={args.device_modules}'):
            importlib.import_module(module)
    if device.type == 'cuda':
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True  # as in train.py
        args.torchcompile = 'inductor' if args.torchcompile is None else args.torchcompile
    check_output(output)
    net = create_net(args, *datasets)
    images, validation = (load_images(dataset, net, device) for dataset in datasets)
    check_labels(f'val_split={args.val_split!r}', validation[1], net.num_classes)
    if args.val_split != args.train_split and torch.equal(images[0], validation[0]):  # of a folder without splits
        raise ValueError(f'val_split={args.val_split!r}: needs other images than train_split={args.train_split!r}')
    training = Training(args, net, images, batches)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / '.lock', timeout=0):  # the system releases it if the process is killed
            training.run(validation, output)
    except Timeout as e:
        raise ValueError(f'output={str(output)!r}: another training uses it') from e
    except FloatingPointError as e:
        raise FloatingPointError(f'{e}; {output} keeps the previous epochs') from e
    return training


def run_facts(training: Training, recipe: str, overrides: Sequence[str], data: str) -> Dict[str, Any]:
    """Return the facts of a run for its model card; None for facts that do not apply."""
    args, device, batches, epochs = training.args, training.images.device, training.batches, len(training.history)
    whole = training.share == 1
    origin = args.initial_checkpoint or (args.model.removesuffix('.cifar10') if args.pretrained else '')
    return {
        'recipe': recipe,
        'script': 'timm-selfconv train',
        'arguments': ' '.join(overrides if whole else [*overrides, f'--batches {batches}']) or 'none',
        'epochs': epochs if whole else f'{epochs * training.share:.1f}',
        'images': None if whole else
                  f'{epochs * batches * args.batch_size:,}: {epochs} x {batches} batches of {args.batch_size}',
        'image sizes': ', '.join(f'{size} px from epoch {start}' for start, size in sorted(args.img_sizes.items())),
        'initialised from': data_name(origin.removeprefix('local-dir:')) if origin else 'none',
        'teacher': ', '.join(teachers(origin)) or ('unknown' if origin and not card_facts(origin) else 'none'),
        'weights': 'after the last epoch' if training.ema is None else f'moving average, decay {args.model_ema_decay}',
        'seed': args.seed,
        'precision': 'bfloat16 autocast' if training.amp else 'float32',
        'hardware': torch.cuda.get_device_name(device) if device.type == 'cuda'
                    else f'{device.type.upper()}, {torch.get_num_threads()} thread(s)',
        'time': f'{training.seconds / 60:.0f} minutes',
        'data': f'{data_name(data)}, split {args.train_split}',
    }


def save_net(training: Training, folder: Path, facts: Dict[str, Any]) -> str:
    """Write a run's model and card into its folder, for timm's ``local-dir:``, and return that name."""
    name = folder.resolve().name
    net: Any = copy.deepcopy(training.result).to(memory_format=torch.contiguous_format).cpu()
    classes, (height, width) = class_names(net, net.num_classes), training.images.shape[-2:]
    card = card_text(
        name,
        f"`{net.pretrained_cfg['architecture']}` for pictures of {height} x {width} pixels and {len(classes)} classes: "
        f"{', '.join(classes)}.",
        {**facts, 'validation accuracy': f"{training.history[-1]['eval_top1'] / 100:.4f} (in eval mode)"},
        f"'local-dir:{name}', pretrained=True")
    with tempfile.TemporaryDirectory() as temporary:
        write_net(net, temporary, card)
        for file in (WEIGHTS_FILE, 'README.md', 'config.json'):  # config.json last: timm needs it
            replace_file(folder / file, partial(shutil.copyfile, Path(temporary, file)))
    return f'local-dir:{folder}'
