"""The papers' tables as published, beside what is measured here."""
import functools
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional

import timm
from tabulate import tabulate

from timm_selfconv.hub import card_facts, measured_accuracy
from .counting import Counts, count

__all__ = [
    'PUBLISHED', 'REPORTED', 'format_results', 'format_tables', 'format_zoo', 'paper_tables', 'results_rows',
    'zoo_names', 'zoo_rows',
]

PAPER = 'Cordonnier, Loukas, Jaggi, ICLR 2020 (arXiv:1911.03584)'


@dataclass(frozen=True)
class Published:
    """A row of a table as published: CIFAR-10 test accuracy between 0 and 1, parameters and FLOPs as printed."""
    table: str
    label: str
    name: str
    accuracy: float
    parameters: str
    flops: str
    source: str = PAPER


PUBLISHED = (
    Published('Table 1', 'ResNet18', 'resnet18_cifar', 0.938, '11.2M', '1.1B'),
    Published('Table 1', 'SA quadratic emb.', 'sa_quadratic_cifar', 0.938, '12.1M', '6.2B'),
    Published('Table 1', 'SA learned emb.', 'sa_learned_cifar', 0.918, '12.3M', '6.2B'),
    Published('Table 1', 'SA learned emb. + content', 'sa_learned_content_cifar', 0.871, '29.5M', '15B'),
    Published('Table 4', 'SA quadratic emb.', 'sa_quadratic_cifar', 0.938, '12.1M', '6.2B'),
    Published('Table 4', 'SA quadratic emb. gen.', 'sa_quadratic_gen_cifar', 0.934, '12.1M', '6.2B'),
    Published(
        'Table 4', 'SA quadratic emb. gen. pruned', 'sa_quadratic_gen_pruned_cifar', 0.934, '9.7M', '4.9B'),
)

# CIFAR-10 test accuracies in '[Re] On the Relationship between Self-Attention and Convolutional Layers' (Varma T,
# Prabhu, 2021), whose released code takes them in training mode and at the best epoch on the test split
REPORTED = {
    'resnet18_cifar': 0.946,
    'sa_quadratic_cifar': 0.943,
    'sa_quadratic_gen_cifar': 0.939,
    'sa_learned_cifar': 0.904,
    'sa_learned_content_cifar': 0.864,
    'sa_learned_content_hier_cifar': 0.910,
    'san_pairwise_cifar': 0.818,
    'san_pairwise_hier_cifar': 0.853,
    'san_patchwise_cifar': 0.857,
    'san_patchwise_hier_cifar': 0.912,
    'resvit_cifar': 0.843,
    'resvit_hier_cifar': 0.877,
}


def zoo_names() -> List[str]:
    """Names of all nets that this package registers, sorted as timm does."""
    return [n for n in timm.list_models() if timm.model_entrypoint(n).__module__.startswith('timm_selfconv.')]


@functools.cache
def zoo_counts(name: str) -> Counts:
    """Counts of a net of the zoo for its own image size."""
    input_size: Any = timm.get_pretrained_cfg_value(name, 'input_size')
    return count(timm.create_model(name), input_size)


def measure(name: str) -> Dict[str, Any]:
    """What is known of a net of the zoo: counts, measured accuracy, whether it has weights, license."""
    return {
        **asdict(zoo_counts(name)),
        'accuracy': measured_accuracy(name),
        'weights': timm.is_model_pretrained(name),
        'license': timm.get_pretrained_cfg_value(name, 'license'),
    }


def paper_tables() -> List[Dict[str, Any]]:
    """Tables 1 and 4 of the paper: one row a published row, with what was published and what is measured here."""
    measured = {name: measure(name) for name in dict.fromkeys(row.name for row in PUBLISHED)}
    return [{**asdict(row), 'measured': measured[row.name]} for row in PUBLISHED]


def zoo_rows() -> List[Dict[str, Any]]:
    """One row a net of the zoo: its name and what is measured here."""
    return [{'name': name, **measure(name)} for name in zoo_names()]


def results_rows() -> List[Dict[str, Any]]:
    """One row a net with an accuracy, published or ours: those, and how the weights that gave ours came about."""
    published = {row.name: row.accuracy for row in PUBLISHED}
    rows = [{
        'name': name,
        'paper': published.get(name),
        'report': REPORTED.get(name),
        'here': measured_accuracy(name),
        **{key: card_facts(name).get(key) for key in ('recipe', 'script', 'epochs', 'seed', 'hardware', 'time')},
    } for name in zoo_names()]
    return [row for row in rows if row['paper'] or row['report'] or row['here']]


def billions(n: int) -> str:
    return f'{n / 1e9:.2f}B'


def accuracy_text(accuracy: Optional[float]) -> str:
    return '-' if accuracy is None else f'{accuracy:.4f}'


def format_tables(rows: List[Dict[str, Any]]) -> str:
    """:func:`paper_tables` for people."""
    texts = []
    for table in dict.fromkeys(row['table'] for row in rows):
        lines = [(
            row['label'], row['name'],
            f"{row['accuracy']:.3f}", accuracy_text(row['measured']['accuracy']),
            row['parameters'], f"{row['measured']['parameters']:,}",
            row['flops'], billions(row['measured']['linear_conv_flops']),
            billions(row['measured']['fvcore_macs']),
            billions(row['measured']['dense_flops']), billions(row['measured']['flops']),
        ) for row in rows if row['table'] == table]
        texts.append(f'{table}, {rows[0]["source"]}\n' + tabulate(
            lines,
            headers=('model', 'name here', 'accuracy\npublished', 'accuracy\nhere', 'params\npublished',
                     'params\nhere', 'FLOPs\npublished', 'FLOPs, the\npaper\'s way', 'fvcore\'s\nmult-adds',
                     'FLOPs with\nattn maps', 'FLOPs with\nattn as run'),
            disable_numparse=True,
            colalign=('left', 'left', *['right'] * 9),
        ))
    texts.append(
        "The paper's way: 2 x multiply-adds of Linear and Conv2d. fvcore's: multiply-adds as fvcore counts them on\n"
        'the path that runs, with norms and pooling, given a handle for fused attention. With attention: 2 x all\n'
        'multiply-adds, through explicit maps and as the net runs. For one 3 x 32 x 32 image. Accuracy here: the\n'
        'shipped weights on all 10,000 test images; - where none ship yet.')
    return '\n\n'.join(texts)


def format_zoo(rows: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    """:func:`zoo_rows` for people, in a format of tabulate's ('github' for Markdown)."""
    return tabulate(
        [(
            row['name'], f"{row['parameters']:,}", billions(row['linear_conv_flops']), billions(row['flops']),
            'yes' if row['weights'] else 'not yet', accuracy_text(row['accuracy']), row['license'],
        ) for row in rows],
        headers=('name', 'parameters', "FLOPs, the paper's way", 'FLOPs with attention', 'weights',
                 'test accuracy', 'license'),
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=('left', 'right', 'right', 'right', 'left', 'right', 'left'),
    )


def format_results(rows: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    """:func:`results_rows` for people, in a format of tabulate's ('github' for Markdown)."""
    return tabulate(
        [(
            row['name'],
            *('-' if row[key] is None else f'{row[key]:.3f}' for key in ('paper', 'report')),
            accuracy_text(row['here']),
            *(row[key] or '-' for key in ('recipe', 'script', 'epochs', 'seed', 'hardware', 'time')),
        ) for row in rows],
        headers=('name', 'paper', 'report', 'here', 'recipe', 'script', 'epochs', 'seed', 'hardware', 'time'),
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=('left', *['right'] * 3, *['left'] * 2, *['right'] * 2, *['left'] * 2),
    )
