"""The papers' tables as published, beside what is measured here."""
import functools
from dataclasses import asdict
from typing import Any, Dict, List, Optional

import timm
import torch
from tabulate import tabulate

from timm_selfconv.hub import card_facts, default_weights, measured_accuracy, shipped_names
from timm_selfconv.models import zoo_names
from .bench import bench_nets
from .counting import Counts, count
from .published import PAPER, PUBLISHED, REPORT

__all__ = [
    'format_results', 'format_tables', 'format_zoo', 'paper_tables', 'results_rows', 'zoo_names', 'zoo_rows',
]

# facts of model cards that say how weights came about
HOW = ('initialised from', 'recipe', 'script', 'epochs', 'seed', 'hardware', 'time')


@functools.cache
def zoo_counts(name: str) -> Counts:
    """Counts of a net of the zoo for its own image size."""
    input_size: Any = timm.get_pretrained_cfg_value(name, 'input_size')
    return count(timm.create_model(name), input_size)


def measure(name: str) -> Dict[str, Any]:
    """What is known of a net of the zoo: counts, accuracy of its default weights and where they began, license."""
    weights = default_weights(name)
    return {
        **asdict(zoo_counts(name)),
        'accuracy': measured_accuracy(weights),
        'initialised_from': card_facts(weights).get('initialised from'),
        'weights': timm.is_model_pretrained(name),
        'license': timm.get_pretrained_cfg_value(name, 'license'),
    }


def time_ratio(plain: str, name: str) -> float:
    """How many times longer a batch of 4 takes through the first of two nets of the zoo, measured here in one run."""
    input_size: Any = timm.get_pretrained_cfg_value(name, 'input_size')
    seconds = bench_nets([timm.create_model(plain), timm.create_model(name)], torch.randn(4, *input_size))
    return seconds[0] / seconds[1]


def paper_tables(time: bool = False) -> List[Dict[str, Any]]:
    """The paper's Tables 1 and 4 and the report's Tables 1 to 3.

    Args:
        time: Measure the time of plain attention to hierarchical too, which takes about a minute.

    Returns:
        One row a published row, with what was published and what is measured here.
    """
    measured = {name: measure(name) for name in dict.fromkeys(row.name for row in PUBLISHED)}
    return [{
        **asdict(row),
        'measured': measured[row.name],
        'time_ratio': time_ratio(row.plain, row.name) if time and row.plain else None,
    } for row in PUBLISHED]


def zoo_rows() -> List[Dict[str, Any]]:
    """One row a net of the zoo: its name and what is measured here."""
    return [{'name': name, **measure(name)} for name in zoo_names()]


def results_rows() -> List[Dict[str, Any]]:
    """One row per net with a published accuracy and per weights that ship: accuracies, and how ours came about."""
    published: Dict[Any, float] = {}
    for row in PUBLISHED:
        if not row.differs:
            published.setdefault((row.source, row.name), row.accuracy)  # Table 1 before what later ones repeat
    rows = [{
        'name': name,
        'paper': published.get((PAPER, name)),
        'report': published.get((REPORT, name)),
        'here': measured_accuracy(name),
        **{key: card_facts(name).get(key) for key in HOW},
    } for name in sorted({*zoo_names(), *shipped_names()})]
    return [row for row in rows if row['paper'] or row['report'] or row['here']]


def billions(n: int) -> str:
    return f'{n / 1e9:.2f}B'


def accuracy_text(accuracy: Optional[float], initialised_from: Optional[str] = None) -> str:
    return '-' if accuracy is None else f'{accuracy:.4f}' + ('*' if initialised_from else '')


def format_tables(rows: List[Dict[str, Any]]) -> str:
    """:func:`paper_tables` for people."""
    texts, notes = [], list(dict.fromkeys(row['note'] for row in rows if row['note']))
    for source, table in dict.fromkeys((row['source'], row['table']) for row in rows):
        mine = [row for row in rows if (row['source'], row['table']) == (source, table)]
        timed = any(row['time_ratio'] for row in mine)
        lines = [(
            row['label'] + (f" [{notes.index(row['note']) + 1}]" if row['note'] else ''), row['name'],
            f"{row['accuracy']:.3f}", accuracy_text(row['measured']['accuracy'], row['measured']['initialised_from']),
            row['parameters'], f"{row['measured']['parameters']:,}",
            row['flops'], billions(row['measured']['linear_conv_flops']),
            billions(row['measured']['fvcore_macs']),
            billions(row['measured']['dense_flops']), billions(row['measured']['flops']),
            *([f"{row['time_ratio']:.2f}" if row['time_ratio'] else '-'] if timed else []),
        ) for row in mine]
        headers = (
            'model', 'name here', 'accuracy\npublished', 'accuracy\nhere', 'params\npublished', 'params\nhere',
            'FLOPs\npublished', "FLOPs, the\npaper's way", "fvcore's\nmult-adds", 'FLOPs with\nattn maps',
            'FLOPs with\nattn as run', *(['time\nSA / HA'] if timed else []))
        texts.append(f'{table}, {source}\n' + tabulate(
            lines,
            headers=headers,
            disable_numparse=True,
            colalign=('left', 'left', *['right'] * (len(headers) - 2)),
        ))
    texts.append('\n'.join(f'[{i}] {note}' for i, note in enumerate(notes, 1)))
    texts.append(
        "The paper's way: 2 x multiply-adds of Linear and Conv2d. fvcore's: multiply-adds as fvcore counts them on\n"
        'the path that runs, with norms and pooling, given a handle for fused attention. With attention: 2 x all\n'
        'multiply-adds, through explicit maps and as the net runs. For one 3 x 32 x 32 image. Accuracy here: the\n'
        'shipped weights on all 10,000 test images; - where none ship yet. Accuracies of the report: as its released\n'
        'code takes them, in training mode (dropout on) and at the best epoch on the test split.')
    if any(row['measured']['initialised_from'] for row in rows):
        texts.append("* not from scratch: trained on from another net's weights (timm_selfconv.theory.include)")
    return '\n\n'.join(texts)


def format_zoo(rows: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    """:func:`zoo_rows` for people, in a format of tabulate's ('github' for Markdown)."""
    return tabulate(
        [(
            row['name'], f"{row['parameters']:,}", billions(row['linear_conv_flops']), billions(row['flops']),
            'yes' if row['weights'] else 'not yet', accuracy_text(row['accuracy'], row['initialised_from']),
            row['license'],
        ) for row in rows],
        headers=('name', 'parameters', "FLOPs, the paper's way", 'FLOPs with attention', 'weights',
                 'test accuracy', 'license'),
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=('left', 'right', 'right', 'right', 'left', 'right', 'left'),
    )


def format_results(rows: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    """:func:`results_rows` for people, in a format of tabulate's ('github' for Markdown)."""
    how = [key for key in HOW if key != 'initialised from' or any(row[key] for row in rows)]
    return tabulate(
        [(
            row['name'],
            *('-' if row[key] is None else f'{row[key]:.3f}' for key in ('paper', 'report')),
            accuracy_text(row['here']),
            *(row[key] or '-' for key in how),
        ) for row in rows],
        headers=('name', 'paper', 'report', 'here', *how),
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=('left', *['right'] * 3, *('right' if key in ('epochs', 'seed') else 'left' for key in how)),
    )
