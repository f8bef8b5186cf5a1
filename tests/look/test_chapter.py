import importlib
import inspect
import re

import pytest

MODULES = ('attention_maps', 'heads', 'explorer', 'captions', 'figures')


@pytest.mark.parametrize('module', MODULES)
def test_the_reference_has_every_public_name(module, repo):
    """One line each, the first of its docstring."""
    module = importlib.import_module(f'timm_selfconv.look.{module}')
    names = getattr(module, '__all__', None) or [
        name for name, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
    chapter = (repo / 'timm_selfconv' / 'look' / 'README.md').read_text()
    table = chapter.split(f'| `{module.__name__}` | |\n|---|---|\n')[1].split('\n\n')[0]
    rows = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', table, re.MULTILINE))
    assert set(rows) == set(names)
    for name, line in rows.items():
        doc = inspect.getdoc(getattr(module, name)).split('\n\n')[0].replace('\n', ' ')
        assert line.replace('`', '') == re.sub(r':\w+:`~?([^`]+)`', r'\1', doc).replace('`', '')
