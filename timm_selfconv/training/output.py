"""Checkpoints and history of a run."""
import csv
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from timm_selfconv.files import check_new, replace_file
from timm_selfconv.weights.history import HISTORY, write_history

__all__ = ['LAST', 'check_output', 'newest_checkpoint', 'save_checkpoint', 'save_history']

LAST = 'last.pth.tar'
COLUMNS = ('epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr')  # of timm's summary.csv


def checkpoints(output: Path) -> List[Path]:
    """List the checkpoints in a folder, the newest first."""
    older = sorted(output.glob('checkpoint-*.pth.tar'), key=lambda path: int(re.sub(r'\D', '', path.name) or -1))
    return [path for path in (output / LAST, *reversed(older)) if path.is_file()]


def check_output(output: Path) -> None:
    """Raise a FileExistsError for a file, or a folder that has files but no checkpoint."""
    if not output.is_dir() or (any(output.glob('[!.]*')) and not checkpoints(output)):  # kills leave hidden files
        check_new(output)


def newest_checkpoint(output: Path, device: torch.device) -> Tuple[Optional[Path], Any]:
    """Return path and content of the newest readable checkpoint, or None; raise a ValueError if none can be read."""
    paths = checkpoints(output)
    for path in paths:
        try:
            with zipfile.ZipFile(path) as records:  # torch.load ignores checksums
                if records.testzip() is not None:
                    raise ValueError('checksum')
            return path, torch.load(path, map_location=device, weights_only=True)
        except Exception as e:  # torch raises many types
            print(f'{path} cannot be read ({type(e).__name__})', flush=True)
    if paths:
        raise ValueError(f'output={str(output)!r}: none of its checkpoints can be read; choose another folder')
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
