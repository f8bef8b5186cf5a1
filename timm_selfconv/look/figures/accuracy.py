"""Learning curves: validation accuracy and training loss over epochs (paper, Fig. 2 and 13; report, Fig. 1)."""
import csv
import re
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Union

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timm_selfconv.weights import WEIGHTS_DIR
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from .style import TEXT_WIDTH, head_style, styled

__all__ = ['figure_accuracy', 'read_curve', 'read_curves', 'shipped_curves']

Curve = Dict[str, Dict[float, float]]
PANELS = {'eval_top1': 'validation accuracy [%]', 'train_loss': 'training loss'}


def shipped_curves() -> List[Path]:
    """Histories that ship for learning curves, named ``NET.SEED.history.json``: trained by recipes/curves.yaml."""
    return sorted(Path(WEIGHTS_DIR, 'curves').glob(f'*.{HISTORY}'))


def read_curve(run: Union[str, Path]) -> Curve:
    """Validation accuracy and training loss over a run: from its history, else from the summary.csv of timm's train.py.

    Args:
        run: Folder of the run, a net whose history ships, or a file of a history.

    Returns:
        ``eval_top1`` in per cent and ``train_loss``, each by epochs trained, in order, where it was measured; of an
        epoch that stands twice in a summary, the last.

    Raises:
        ValueError: If there is neither, or no accuracy in it.
    """
    history, path = Path(run) if Path(run).is_file() else find_history(run), Path(run, 'summary.csv')
    values: Curve = {key: {} for key in PANELS}
    if history is not None:
        path, rows = history, read_history(history)['rows']
    elif path.is_file():
        with path.open(newline='') as file:
            rows = list(csv.DictReader(file))
    else:
        raise ValueError(f"run={str(run)!r}: needs a net whose history ships, or a folder with {HISTORY} or the "
                         "summary.csv of timm's train script")
    try:
        for row in rows:
            for key, numbers in values.items():
                if row.get(key) not in (None, ''):  # an epoch that was not validated (val_interval)
                    numbers[row['epochs'] if history else int(row['epoch']) + 1] = float(row[key])
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f'{path}: needs numbers in columns epoch and eval_top1 ({type(e).__name__}: {e})') from e
    if not values['eval_top1']:
        raise ValueError(f'{path}: has no validation accuracy')
    return {key: dict(sorted(numbers.items())) for key, numbers in values.items()}


def read_curves(runs: Sequence[Union[str, Path]]) -> Dict[str, List[Curve]]:
    """Curves by name, of runs that :func:`read_curve` takes; those named ``NAME.SEED`` stand under one name.

    Raises:
        ValueError: If one can't be read, or was measured after other epochs than the first of its name.
    """
    names = [Path(run).resolve().name if Path(run).exists() else str(run) for run in runs]
    curves: Dict[str, List[Curve]] = {}
    for name, run in zip(names if len(set(names)) == len(names) else map(str, runs), runs):
        curve = read_curve(run)
        others = curves.setdefault(re.sub(rf'(\.\d+)?(\.{HISTORY})?$', '', name), [])
        for key in PANELS if others else ():
            if list(curve[key]) != list(others[0][key]):
                raise ValueError(
                    f'{run}: has {key} after epochs {list(curve[key])}, needs it after those of the first run of the '
                    f'same name, {list(others[0][key])}')
        others.append(curve)
    return curves


@styled
def figure_accuracy(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Mean validation accuracy and training loss over epochs, in a band from the least to the most of a name's runs.

    Args:
        curves: What :func:`read_curves` returns.
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.5 + 0.12 * len(curves)), layout='constrained')
    measured = [key for key in PANELS if any(run[key] for runs in curves.values() for run in runs)]
    for ax, key in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured):
        for number, runs in enumerate(curves.values()):
            epochs, values = list(runs[0][key]), list(zip(*(run[key].values() for run in runs)))
            means, color = [sum(each) / len(each) for each in values], head_style(2 * number)[0]  # neighbours are alike
            ax.plot(epochs, means, color=color, marker='osD^v'[number % 5], markersize=2.5)
            ax.fill_between(epochs, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2)
        ax.set(xlabel='epochs trained', ylabel=PANELS[key])
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(color='0.9', linewidth=0.5)
    last = {name: [list(run['eval_top1'].values())[-1] for run in runs] for name, runs in curves.items()}
    figure.legend(
        figure.axes[0].lines, [f'{name}: {sum(each) / len(each):.1f} %' + (
            f' (from {min(each):.1f} to {max(each):.1f} in {len(each)} runs)' if len(each) > 1 else '')
            for name, each in last.items()],
        loc='outside lower center', title_fontsize=6,
        title='accuracy after the last epoch; of several runs the mean, in a band from the least to the most')
    return figure
