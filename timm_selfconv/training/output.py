"""The folder of a run: its checkpoints and history, and the numbers that loggers get."""
import argparse
import csv
import importlib
import re
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from timm_selfconv.files import as_value_error, check_new, replace_file
from timm_selfconv.weights.history import HISTORY, write_history

__all__ = ['LAST', 'Log', 'check_output', 'newest_checkpoint', 'save_checkpoint', 'save_history']

LAST = 'last.pth.tar'
COLUMNS = ('epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr')  # of timm's summary.csv


def checkpoints(output: Path) -> List[Path]:
    """The checkpoints in a folder, the newest first."""
    older = sorted(output.glob('checkpoint-*.pth.tar'), key=lambda path: int(re.sub(r'\D', '', path.name) or -1))
    return [path for path in (output / LAST, *reversed(older)) if path.is_file()]


def check_output(output: Path) -> None:
    """Raise a FileExistsError if a folder has files but no checkpoint, because a run would write among them."""
    if any(output.glob('[!.]*')) and not checkpoints(output):  # a run that ends in its first epoch leaves hidden files
        check_new(output)


def newest_checkpoint(output: Path, device: torch.device) -> Tuple[Optional[Path], Any]:
    """The newest whole checkpoint and its path, None if there are none; a ValueError if none of them is whole."""
    paths = checkpoints(output)
    for path in paths:
        try:
            with zipfile.ZipFile(path) as records:  # torch.load reads past flipped bits
                if records.testzip() is not None:
                    raise ValueError('checksum')
            return path, torch.load(path, map_location=device, weights_only=True)
        except Exception as e:  # it depends on where the file ends
            print(f'{path} is damaged ({type(e).__name__})', flush=True)
    if paths:
        raise ValueError(f'output={str(output)!r}: no checkpoint in it is whole; choose another')
    return None, None


def save_checkpoint(output: Path, checkpoint: Dict[str, Any], kept: int) -> None:
    """Write last.pth.tar; the last ones before it stay, so that there are at most ``kept``."""
    last = output / LAST
    if last.is_file():
        replace_file(output / f'checkpoint-{checkpoint["epoch"] - 1}.pth.tar', lambda path: shutil.copyfile(last, path))
    replace_file(last, lambda path: torch.save(checkpoint, path))
    for path in checkpoints(output)[kept:]:
        path.unlink()


def write_summary(path: Path, history: List[Dict[str, Any]]) -> None:
    """Write the summary.csv of timm's train.py; an epoch that was not validated has gaps."""
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(history)


def save_history(output: Path, checkpoint: Dict[str, Any], grid: Optional[List[int]], share: float) -> None:
    """Write summary.csv and history.json from a checkpoint; ``share`` is the part of the images in an epoch."""
    rows = [{'epochs': (row['epoch'] + 1) * share, **{key: row[key] for key in row if key != 'epoch'}}
            for row in checkpoint['history']]
    replace_file(output / 'summary.csv', lambda path: write_summary(path, checkpoint['history']))
    write_history(output / HISTORY, checkpoint['arch'], grid, [dict(epochs=0, heads=checkpoint.get('start')), *rows])


class Log:
    """Gives the numbers of epochs to TensorBoard where it is installed, and to wandb if a recipe has ``log_wandb``."""

    def __init__(self, args: argparse.Namespace, output: Path):
        self.output = output
        self.tensorboard: Any = None
        self.wandb: Any = None
        if args.log_wandb:
            with as_value_error('log_wandb=True'):
                self.wandb = importlib.import_module('wandb')
                self.wandb.init(project=args.wandb_project, name=output.name, config=vars(args))

    def __call__(self, history: List[Dict[str, Any]]) -> None:
        """Log the last row of a history, and all rows to TensorBoard at first: the last run may have been killed."""
        rows = [{key: row[key] for key in COLUMNS if key in row} for row in history]
        if self.wandb is not None:
            self.wandb.log(rows[-1])
        if find_spec('tensorboard') is None:
            return
        new = rows[-1:]
        if self.tensorboard is None:  # after the first checkpoint: see check_output
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard, new = SummaryWriter(str(self.output / 'tensorboard'), purge_step=0), rows
        for row in new:
            for key, value in row.items():
                self.tensorboard.add_scalar(key, value, row['epoch'])
        self.tensorboard.flush()
