"""Validation accuracy over epochs (paper, Fig. 2 and 13; report, Fig. 1)."""
import csv
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timm_selfconv.weights.history import HISTORY, accuracies, find_history, read_history
from .style import TEXT_WIDTH, head_style, styled

__all__ = ['figure_accuracy', 'read_accuracies']


def read_accuracies(run: Union[str, Path]) -> List[Tuple[float, float]]:
    """Validation accuracy over a run: from its history, else from the summary.csv of timm's train script.

    Args:
        run: Folder of the run, or a net whose history ships.

    Returns:
        Epochs trained and top-1 accuracy in per cent, in order, where it was measured; of an epoch that stands twice in
        a summary, the last.

    Raises:
        ValueError: If there is neither, or no accuracy in it.
    """
    history, path = find_history(run), Path(run, 'summary.csv')
    accuracy: Dict[float, float] = {}
    if history is not None:
        path, accuracy = history, accuracies(read_history(history))
    elif path.is_file():
        with path.open(newline='') as file:
            try:
                for row in csv.DictReader(file):
                    if row['eval_top1'] != '':  # an epoch that was not validated (val_interval)
                        accuracy[int(row['epoch']) + 1] = float(row['eval_top1'])
            except (KeyError, TypeError, ValueError) as e:
                raise ValueError(
                    f'{path}: needs numbers in columns epoch and eval_top1 ({type(e).__name__}: {e})') from e
    else:
        raise ValueError(f"run={str(run)!r}: needs a net whose history ships, or a folder with {HISTORY} or the "
                         "summary.csv of timm's train script")
    if not accuracy:
        raise ValueError(f'{path}: has no epochs')
    return sorted(accuracy.items())


@styled
def figure_accuracy(runs: Dict[str, Sequence[Tuple[float, float]]]) -> Figure:
    """Validation accuracy over epochs of several runs.

    Args:
        runs: By name, what :func:`read_accuracies` returns.
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.8), layout='constrained')
    ax = figure.subplots()
    for number, (name, points) in enumerate(runs.items()):
        color, _ = head_style(number)
        ax.plot(
            *zip(*points), color=color, marker='osD^v'[number % 5], markersize=2.5,
            label=f'{name}: {points[-1][1]:.1f} %')
    ax.set(xlabel='epochs trained', ylabel='validation accuracy [%]')
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color='0.9', linewidth=0.5)
    ax.legend(handles=ax.lines, title='run, and its last epoch', title_fontsize=6)
    return figure
