"""The reference page: ``python -m timm_selfconv.reference`` writes REFERENCE.md."""
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, List, Set

import torch

import timm_selfconv
from .files import replace_file

__all__ = ['reference']

PAGE = Path(__file__).with_name('REFERENCE.md')
INTRODUCTION = """# Reference

All public functions and classes, by the module that you import them from. `help(name)` adds types, shapes, units and
errors. `python -m timm_selfconv.reference` writes this page."""
# commands, and modules with names that the package above exports
SKIPPED = re.compile(r'\._|\.(cli|commands|reference|version)\b|\.(layers|models|theory|figures)\.')


def entry(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    left_out = ('device', 'dtype') if inspect.isclass(value) and issubclass(value, torch.nn.Module) else ()
    parameters = [parameter.replace(annotation=parameter.empty)
                  for parameter in signature.parameters.values() if parameter.name not in left_out]
    code = f'{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}'
    code = re.sub(r'<function (?:\w+\.)*(\S+) at 0x\w+>', r'\1', code)  # defaults
    summary = re.sub(r':\w+:`~?([^`]+)`', r'`\1`', (inspect.getdoc(value) or '').split('\n\n')[0]).replace('``', '`')
    return f'- `{code}`: {" ".join(summary.split())}'


def reference() -> str:
    """The text of the page: a section per module. The first module that exports a name lists it."""
    sections: List[str] = [INTRODUCTION]
    listed: Set[Any] = set()
    modules = pkgutil.walk_packages(timm_selfconv.__path__, 'timm_selfconv.')
    for module_name in ['timm_selfconv', *(module.name for module in modules if not SKIPPED.search(module.name))]:
        module = importlib.import_module(module_name)
        public = getattr(module, '__all__', [name for name in vars(module) if name[0] != '_'])
        values = inspect.getmembers(module, lambda value: inspect.isfunction(value) or inspect.isclass(value))
        new = [(name, value) for name, value in values if name in public
               and value.__module__.startswith('timm_selfconv') and value not in listed]
        listed.update(value for _, value in new)
        if new:
            sections.append('\n'.join([f'## {module_name}\n', *(entry(*item) for item in new)]))
    return '\n\n'.join(sections) + '\n'


if __name__ == '__main__':
    replace_file(PAGE, lambda file: file.write_text(reference()))
