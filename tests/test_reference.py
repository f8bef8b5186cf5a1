"""The chapters' references: every public function and class, its parameters and the first line of its docstring.

``python tests/test_reference.py`` writes them anew.
"""
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

CHAPTERS = {
    'timm_selfconv/models': ('models', 'weights', 'weights.history', 'weights.loading', 'weights.saving',
                             'weights.publishing', 'files'),
    'timm_selfconv/layers': ('layers',),
    'timm_selfconv/theory': ('theory',),
    'timm_selfconv/look': (
        'look.attention_maps', 'look.heads', 'look.explorer', 'look.theorem', 'look.figures', 'look.repository'),
    'timm_selfconv/measure': (
        'measure.counting', 'measure.evaluation', 'measure.bench', 'measure.published', 'measure.tables', 'data'),
    'recipes': (
        'training.recipes', 'training.net', 'training.trainer', 'training.augment', 'training.initialization',
        'training.optimization', 'training.distillation', 'training.runs', 'training.picture_folder'),
}
EACH = [(chapter, f'timm_selfconv.{module}') for chapter, modules in CHAPTERS.items() for module in modules]


def row(name, value):
    """Names of parameters only: types and defaults are in the docstring that ``help`` shows."""
    skipped = ('device', 'dtype') if inspect.isclass(value) and issubclass(value, torch.nn.Module) else ()
    parameters = ', '.join(name for name in inspect.signature(value).parameters if name not in skipped)
    line = re.sub(r':\w+:`~?([^`]+)`', r'`\1`', inspect.getdoc(value).split('\n\n')[0]).replace('``', '`')
    return f'| `{name}({parameters})` | {" ".join(line.split())} |'


def reference(module):
    """The table of a module."""
    module = importlib.import_module(module)
    names = getattr(module, '__all__', None) or [name for name in vars(module) if not name.startswith('_')]
    public = {name: getattr(module, name) for name in sorted(names)}
    rows = [row(*item) for item in public.items() if inspect.isfunction(item[1]) or inspect.isclass(item[1])]
    return '\n'.join([f'| `{module.__name__}` | |', '|---|---|', *rows]) + '\n\n'


@pytest.mark.parametrize('chapter,module', EACH)
def test_the_reference_is_what_the_code_says(chapter, module, repo):
    assert reference(module) in (repo / chapter / 'README.md').read_text() + '\n'


if __name__ == '__main__':
    for chapter, module in EACH:
        readme = Path(__file__).resolve().parent.parent / chapter / 'README.md'
        text = readme.read_text()
        begin = text.index(f'| `{module}` | |\n')
        end = text.find('\n\n', begin)
        text = text[:begin] + reference(module) + (text[end + 2:] if end >= 0 else '')
        readme.write_text(text.rstrip() + '\n')
