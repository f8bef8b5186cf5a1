"""Learning curves: validation accuracy and training loss over epochs (paper, Fig. 2 and 13; report, Fig. 1)."""
import csv
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Union

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timm_selfconv.weights import WEIGHTS_DIR
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from .style import head_style, styled, titled_figure

__all__ = ['figure_accuracy', 'read_curve', 'read_curves', 'shipped_curves']

Curve = Dict[str, Dict[float, float]]
PANELS = {'eval_top1': 'validation accuracy [%]', 'train_loss': 'training loss'}


def shipped_curves() -> List[Path]:
    """Files of the histories that ship, ``NET.SEED.history.json``, trained with recipes/curves.yaml."""
    return sorted(Path(WEIGHTS_DIR, 'curves').glob(f'*.{HISTORY}'))


def read_curve(run: Union[str, Path]) -> Curve:
    """Read validation accuracy and training loss from a run's history, or from the summary.csv of timm's train.py.

    Args:
        run: Folder of the run, name of a net with a history that ships, or path of a history.

    Returns:
        ``eval_top1`` in per cent and ``train_loss``, each a dict by epochs trained, in order. If a resumed run has an
        epoch twice, the last value counts.

    Raises:
        ValueError: If there is no such file, or no accuracy in it.
    """
    history = Path(run) if Path(run).is_file() else find_history(run)
    path = history or Path(run, 'summary.csv')
    if not path.is_file():
        raise ValueError(f"run={str(run)!r}: needs a net with a shipped history, or a folder with {HISTORY} or the "
                         "summary.csv of timm's train script")
    rows: Any = read_history(history)['rows'] if history else list(csv.DictReader(path.read_text().splitlines()))
    try:
        values = {key: {
            row['epochs'] if history else int(row['epoch']) + 1: float(row[key])
            for row in rows if row.get(key) not in (None, '')} for key in PANELS}  # empty for epochs without validation
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f'{path}: needs numbers in columns epoch and eval_top1 ({type(e).__name__}: {e})') from e
    if not values['eval_top1']:
        raise ValueError(f'{path}: has no validation accuracy')
    return {key: dict(sorted(numbers.items())) for key, numbers in values.items()}


def read_curves(runs: Sequence[Union[str, Path]]) -> Dict[str, List[Curve]]:
    """Read several runs; runs called ``NAME.SEED`` are grouped under NAME.

    Raises:
        ValueError: If a run cannot be read, or the runs of a name were measured after different epochs.
    """
    names = [Path(run).resolve().name if Path(run).exists() else str(run) for run in runs]
    curves: Dict[str, List[Curve]] = {}
    for name, run in zip(names if len(set(names)) == len(names) else map(str, runs), runs):
        curve = read_curve(run)
        group = curves.setdefault(re.sub(rf'(\.\d+)?(\.{HISTORY})?$', '', name), [])
        group.append(curve)
        for key in PANELS:
            if list(curve[key]) != list(group[0][key]):
                raise ValueError(
                    f'{run}: has {key} after epochs {list(curve[key])}, but the first run of the same name has it '
                    f'after epochs {list(group[0][key])}')
    return curves


@styled
def figure_accuracy(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Validation accuracy and training loss over epochs: mean and range of the runs with the same name.

    Args:
        curves: From :func:`read_curves`.
    """
    last = {name: [list(run['eval_top1'].values())[-1] for run in runs] for name, runs in curves.items()}
    last = dict(sorted(last.items(), key=lambda item: -np.mean(item[1])))
    small = 'legend: accuracy after the last epoch'
    if any(len(runs) > 1 for runs in curves.values()):
        small = f'line: mean of the runs of a net; band: lowest to highest; {small}'
    figure = titled_figure(2.3 + 0.12 * len(curves), 'Learning curves', small)
    measured = [key for key in PANELS if any(run[key] for runs in curves.values() for run in runs)]
    for ax, key in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured):
        for number, name in enumerate(last):
            epochs = list(curves[name][0][key])
            values = np.array([list(run[key].values()) for run in curves[name]])
            color = head_style(2 * number)[0]  # neighbouring colours are alike
            ax.plot(
                epochs, values.mean(0), color=color, marker='osD^v'[number % 5], markersize=3, markeredgecolor='white',
                markeredgewidth=0.4)
            ax.fill_between(epochs, values.min(0), values.max(0), color=color, alpha=0.25, linewidth=0)
        ax.set(xlabel='epochs trained', title=PANELS[key])
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis='y', color='0.9', linewidth=0.5)
        ax.spines[['top', 'right']].set_visible(False)
    labels = []
    for name, top1 in last.items():
        spread = f' ({min(top1):.1f} to {max(top1):.1f}, {len(top1)} runs)' if len(top1) > 1 else ''
        labels.append(f'{name}: {np.mean(top1):.1f} %{spread}')
    figure.legend(figure.axes[0].lines, labels, loc='outside lower center')
    return figure
