"""Old names of modules. An import of one warns and returns the contents of the new module."""
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any, Optional

MOVED = {  # old name: new name, both in timm_selfconv; '' is for a package of moved modules
    'analysis': '',
    **{f'analysis.{name}': f'look.{name}' for name in ('attention_maps', 'explorer', 'figures', 'heads')},
    **{f'analysis.{name}': f'measure.{name}' for name in ('bench', 'counting', 'published', 'tables')},
    'hub': 'weights.saving',
    'train': 'commands.train',
    'training.initialization': 'training.net',
    'training.optimization': 'training.net',
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        package, _, old = name.partition('.')
        return importlib.util.spec_from_loader(name, self) if package == 'timm_selfconv' and old in MOVED else None

    def is_package(self, name: str) -> bool:
        return not MOVED[name.partition('.')[2]]

    def get_source(self, name: str) -> str:
        if self.is_package(name):
            return ''
        place = f"timm_selfconv.{MOVED[name.partition('.')[2]]}"
        return (f'import sys, warnings\nfrom {place} import *\n'
                f'warnings.warn("{name} is now {place}", DeprecationWarning, 2 - (__name__ == "__main__"))\n'
                'if __name__ == "__main__":  # python -m timm_selfconv.train\n'
                '    from timm_selfconv.cli import main\n    main(["train", *sys.argv[1:]])\n')


sys.meta_path.insert(0, Finder())  # before the finder of editable installs, which does not know these
