"""The chapters' references have every public function and class, in the words of the code."""
import importlib
import inspect
import re

import pytest

CHAPTERS = {
    'timm_selfconv/models': ('models', 'layers', 'weights', 'weights.history', 'hub', 'files'),
    'timm_selfconv/theory': ('theory',),
    'timm_selfconv/look': (
        'look.attention_maps', 'look.heads', 'look.explorer', 'look.captions', 'look.figures', 'look.repository'),
    'timm_selfconv/measure': (
        'measure.counting', 'measure.evaluation', 'measure.bench', 'measure.published', 'measure.tables', 'data'),
    'recipes': (
        'training.recipes', 'training.trainer', 'training.augment', 'training.initialization', 'training.optimization',
        'training.distillation', 'training.runs', 'training.picture_folder'),
}


def words(text):
    """Without what marks names, in docstrings and in Markdown."""
    return re.sub(r':\w+:`~?([^`]+)`', r'\1', text).replace('`', '')


@pytest.mark.parametrize('chapter,module', [(c, m) for c, modules in CHAPTERS.items() for m in modules])
def test_the_reference_has_every_public_name(chapter, module, repo):
    """One line each, the first of its docstring."""
    module = importlib.import_module(f'timm_selfconv.{module}')
    names = getattr(module, '__all__', None) or [name for name in vars(module) if not name.startswith('_')]
    public = {
        name: value for name, value in vars(module).items()
        if name in names and (inspect.isfunction(value) or inspect.isclass(value))}
    text = (repo / chapter / 'README.md').read_text()
    table = text.split(f'| `{module.__name__}` | |\n|---|---|\n')[1].split('\n\n')[0]
    rows = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', table, re.MULTILINE))
    assert {name: words(row) for name, row in rows.items()} == {
        name: words(inspect.getdoc(value).split('\n\n')[0].replace('\n', ' ')) for name, value in public.items()}
