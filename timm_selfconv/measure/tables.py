"""The papers' tables with published and measured numbers."""
import functools
import json
import re
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List

import tabulate
import timm
from tqdm import tqdm

from timm_selfconv.files import replace_file
from timm_selfconv.models import zoo_names
from timm_selfconv.weights import LICENSE, card_facts, checksums, measured_accuracy
from .counting import count
from .published import ACCURACIES, PAPER, PUBLISHED, REPORT

__all__ = ['format_tables', 'format_zoo', 'paper_tables', 'zoo_rows']

COUNTS = Path(__file__).with_name('counts.json')


@functools.cache
def zoo_counts() -> Dict[str, Dict[str, int]]:
    """Counts of all nets of the zoo by name. Nets without stored counts are counted now."""
    counts = json.loads(COUNTS.read_text())
    return {name: counts.get(name) or live_counts(name) for name in zoo_names()}


def live_counts(name: str) -> Dict[str, int]:
    model: Any = timm.create_model(name)
    return asdict(count(model, model.pretrained_cfg['input_size']))


def measure(name: str) -> Dict[str, Any]:
    return {
        **zoo_counts()[name],
        'accuracy': measured_accuracy(name),
        'epochs': card_facts(name).get('epochs'),
        'weights': name in checksums(),
        'license': LICENSE,
    }


def paper_tables() -> List[Dict[str, Any]]:
    """Rows of the paper's Tables 1 and 4 and the report's Tables 1 to 3, with published and measured numbers."""
    return [{**asdict(row), 'measured': measure(row.name)} for row in PUBLISHED]


def zoo_rows() -> List[Dict[str, Any]]:
    """One row per net of the zoo, with published and measured numbers."""
    return [{
        'name': name, 'paper': ACCURACIES.get((PAPER, name)), 'report': ACCURACIES.get((REPORT, name)), **measure(name),
    } for name in zoo_counts()]


def shown(value: Any, form: str = '') -> str:
    return '-' if value is None else format(value, form)


def billions(n: int) -> str:
    return f'{n / 1e9:.2f}B'


def table(lines: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    padding, tabulate.MIN_PADDING = tabulate.MIN_PADDING, 0  # else tables are 15 columns wider
    try:
        return tabulate.tabulate(
            lines, headers='keys', tablefmt=tablefmt, disable_numparse=True,
            colalign=['left', *['right'] * (len(lines[0]) - 1)])
    finally:
        tabulate.MIN_PADDING = padding


def format_tables(rows: List[Dict[str, Any]]) -> str:
    """Format :func:`paper_tables` as text of 100 columns."""
    texts, notes = [], list(dict.fromkeys(row['note'] for row in rows if row['note']))
    for source, number in dict.fromkeys((row['source'], row['table']) for row in rows):
        mine = [row for row in rows if (row['source'], row['table']) == (source, number)]
        lines = []
        for row in mine:
            here, note = row['measured'], f"[{notes.index(row['note']) + 1}]" if row['note'] else ''
            lines.append({
                'model': row['label'] + note, 'acc.\npubl.': shown(row['accuracy'], '.3f'),
                'acc.\nhere': shown(here['accuracy'], '.4f'),
                'diff.': shown(here['accuracy'] and here['accuracy'] - row['accuracy'], '+.3f'),
                'ep.\nhere': shown(here['epochs']),
                'params\npubl.': row['parameters'], 'params\nhere': f"{here['parameters']:,}",
                'FLOPs\npubl.': row['flops'], 'FLOPs\nhere': billions(here['linear_conv_flops']),
                'ms\npubl.': shown(row['milliseconds'], '.3f')})
        keys = [key for key in lines[0] if 'here' in key or any(line[key] != '-' for line in lines)]
        lines = [{key: line[key] for key in keys} for line in lines]
        texts.append(textwrap.fill(f'{number}, {source}', 100) + '\n' + table(lines))
    explanation = (
        'FLOPs: 2 x multiply-adds of Linear and Conv2d for one 3 x 32 x 32 image, as in the paper. timm-selfconv list '
        "includes attention; with --json it also counts explicit attention maps and gives fvcore's count. Accuracy "
        'here: the weights of pretrained=True on all 10,000 test images. Published: after 300 epochs (pruned nets: 100 '
        'more). The report measured with dropout on and chose the best epoch on the test split. ms: time of one image '
        'on a GPU.')
    texts += ['\n'.join(textwrap.fill(f'[{i}] {note}', 100) for i, note in enumerate(notes, 1)),
              textwrap.fill(explanation, 100)]
    return '\n\n'.join(texts)


def format_zoo(rows: List[Dict[str, Any]], tablefmt: str = 'simple') -> str:
    """Format :func:`zoo_rows` in 100 columns, in one of tabulate's formats ('github' for Markdown)."""
    return table([{
        'name': row['name'], 'parameters': f"{row['parameters']:,}", 'FLOPs': billions(row['flops']),
        'paper': shown(row['paper'], '.3f'), 'report': shown(row['report'], '.3f'),
        'here': shown(row['accuracy'], '.4f'), 'epochs': shown(row['epochs']),
    } for row in rows], tablefmt)


if __name__ == '__main__':  # in a checkout: update the stored counts and the table of the README
    lines = ',\n'.join(f'  "{name}": {json.dumps(live_counts(name))}' for name in tqdm(zoo_names()))  # a net a line
    replace_file(COUNTS, lambda file: file.write_text(f'{{\n{lines}\n}}\n'))
    readme, zoo = COUNTS.parents[2] / 'README.md', format_zoo([row for row in zoo_rows() if row['weights']], 'github')
    text = re.sub(r'^\| name (.*\n\|)*.*', lambda _: zoo, readme.read_text(), flags=re.MULTILINE)
    replace_file(readme, lambda file: file.write_text(text))
