"""Checkpoints, history and logs of a run."""
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
    """List the checkpoints in a folder, the newest first."""
    older = sorted(output.glob('checkpoint-*.pth.tar'), key=lambda path: int(re.sub(r'\D', '', path.name) or -1))
    return [path for path in (output / LAST, *reversed(older)) if path.is_file()]


def check_output(output: Path) -> None:
    """Raise a FileExistsError if a folder has files but no checkpoint."""
    if any(output.glob('[!.]*')) and not checkpoints(output):  # a run stopped in its first epoch leaves hidden files
        check_new(output)


def newest_checkpoint(output: Path, device: torch.device) -> Tuple[Optional[Path], Any]:
    """Return path and content of the newest intact checkpoint, or None; raise a ValueError if all are damaged."""
    paths = checkpoints(output)
    for path in paths:
        try:
            with zipfile.ZipFile(path) as records:  # torch.load ignores checksums
                if records.testzip() is not None:
                    raise ValueError('checksum')
            return path, torch.load(path, map_location=device, weights_only=True)
        except Exception as e:  # torch raises many types
            print(f'{path} is damaged ({type(e).__name__})', flush=True)
    if paths:
        raise ValueError(f'output={str(output)!r}: all its checkpoints are damaged; choose another folder')
    return None, None


def save_checkpoint(output: Path, checkpoint: Dict[str, Any], kept: int) -> None:
    """Write last.pth.tar and keep older checkpoints, at most ``kept`` in all."""
    last = output / LAST
    if last.is_file():
        replace_file(output / f'checkpoint-{checkpoint["epoch"] - 1}.pth.tar', lambda path: shutil.copyfile(last, path))
    replace_file(last, lambda path: torch.save(checkpoint, path))
    for path in checkpoints(output)[kept:]:
        path.unlink()


def write_summary(path: Path, history: List[Dict[str, Any]]) -> None:
    """Write summary.csv as timm's train.py does; epochs without validation have empty cells."""
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(history)


def save_history(output: Path, checkpoint: Dict[str, Any], grid: Optional[List[int]], share: float) -> None:
    """Write summary.csv and history.json from a checkpoint; ``share`` is the fraction of the images in an epoch."""
    rows = [{'epochs': (row['epoch'] + 1) * share, **{key: row[key] for key in row if key != 'epoch'}}
            for row in checkpoint['history']]
    replace_file(output / 'summary.csv', lambda path: write_summary(path, checkpoint['history']))
    write_history(output / HISTORY, checkpoint['arch'], grid, [dict(epochs=0, heads=checkpoint.get('start')), *rows])


class Log:
    """Logs to TensorBoard if it is installed, and to wandb if the recipe has ``log_wandb``."""

    def __init__(self, args: argparse.Namespace, output: Path):
        self.output = output
        self.tensorboard: Any = None
        self.wandb: Any = None
        if args.log_wandb:
            with as_value_error('log_wandb=True'):
                self.wandb = importlib.import_module('wandb')
                self.wandb.init(project=args.wandb_project, name=output.name, config=vars(args))

    def __call__(self, history: List[Dict[str, Any]]) -> None:
        """Log the last row of a history. The first call gives TensorBoard all rows, because a run may have resumed."""
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
