"""The command ``timm-selfconv`` without a wait for torch.

Importing `timm_selfconv` registers the zoo in timm, which takes seconds. So this module, outside of the package, enters
it with an empty `__init__`, which runs when something asks for a name in it. `python -m timm_selfconv` always waits.
"""
import importlib.util
import sys
from typing import Any, Optional, Sequence

__all__ = ['main']


def main(argv: Optional[Sequence[str]] = None) -> None:
    spec: Any = importlib.util.find_spec('timm_selfconv')
    package: Any = importlib.util.module_from_spec(spec)
    sys.modules['timm_selfconv'] = package

    def initialise(name: str) -> Any:
        del package.__getattr__
        spec.loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = initialise
    from timm_selfconv.cli import main
    main(argv)


if __name__ == '__main__':
    main()
