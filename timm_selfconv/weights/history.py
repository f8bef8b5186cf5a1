"""The history of a run: a row per epoch with losses, accuracies and heads.

A run writes ``history.json`` into its folder. The history of shipped weights is ``NAME.history.json``. It is one JSON
object:

    model   name of the net
    grid    rows and columns of its layers, or null
    rows    an object after 0, 1, 2, ... epochs, or equal parts of an epoch: ``epochs`` (trained so far);
            ``train_loss``, ``lr`` and ``images_per_second`` since the last row; ``eval_loss``, ``eval_top1`` and
            ``eval_top5`` (per cent) after a validation; ``heads``, by layer and head: mean (row, column) and covariance
            (rows, columns, both) of the attended offset in pixels of the grid, or null for attention to content
"""
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from timm_selfconv.files import replace_file
from . import weights_path

__all__ = ['HISTORY', 'accuracies', 'find_history', 'read_history', 'write_history']

HISTORY = 'history.json'  # in the folder of a run


def find_history(run: Union[str, Path]) -> Optional[Path]:
    """Path of the history of shipped weights (by name) or of a run (``local-dir:``, Path or ``./NAME``), or None."""
    shipped = weights_path(str(run)).with_suffix(f'.{HISTORY}')
    is_name = isinstance(run, str) and Path(run).name == run
    path = shipped if is_name and shipped.is_file() else Path(str(run).removeprefix('local-dir:'), HISTORY)
    return path if path.is_file() else None


def read_history(path: Path) -> Dict[str, Any]:
    """Read a history. Raises a ValueError if the file is not a history, or a row or number is missing."""
    try:
        history = json.loads(path.read_text())
        epochs = [row['epochs'] for row in history['rows']]
        if len(epochs) < 2 or not 0 < epochs[1] <= 1 or any(x != n * epochs[1] for n, x in enumerate(epochs)):
            raise ValueError(f'needs a row for each epoch from 0 on, has {epochs}')
        told = [row['train_loss'] for row in history['rows'][1:]] + list(accuracies(history).values())
        heads = [head for row in history['rows'] for layer in row['heads'] or () for head in layer]
        if not all(len(head) == 5 for head in heads):
            raise ValueError('needs five numbers for each head')
        [float(x) for numbers in (told, *heads) for x in numbers]
        if not {'model', 'grid'} <= history.keys():
            raise ValueError(f'needs model, grid and rows, has {", ".join(history)}')
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'{path}: is no history of timm-selfconv train ({type(e).__name__}: {e})') from e
    return history


def write_history(path: Path, model: str, grid: Optional[List[int]], rows: List[Dict[str, Any]]) -> None:
    """Write or replace a history atomically, with a line per row."""
    lines = ',\n  '.join(json.dumps(row) for row in rows)
    text = f'{{"model": {json.dumps(model)}, "grid": {json.dumps(grid)}, "rows": [\n  {lines}\n]}}\n'
    replace_file(path, lambda file: file.write_text(text))


def accuracies(history: Dict[str, Any]) -> Dict[float, float]:
    """Measured top-1 accuracy in per cent, by trained epochs."""
    return {row['epochs']: row['eval_top1'] for row in history['rows'] if row.get('eval_top1') is not None}
