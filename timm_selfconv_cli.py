"""The `timm-selfconv` command without a wait for torch.

Importing `timm_selfconv` registers the zoo in timm, and importing timm takes seconds. The command's words, the tables
and where recipes lie need neither. So this module, which lies outside of the package, enters it without running its
`__init__`, and runs that when a command needs the nets. `python -m timm_selfconv` is the same command and always waits.
"""
import importlib.util
import sys
from typing import Optional, Sequence

__all__ = ['main']


def main(argv: Optional[Sequence[str]] = None) -> None:
    spec = importlib.util.find_spec('timm_selfconv')
    assert spec is not None and spec.loader is not None
    package = sys.modules['timm_selfconv'] = importlib.util.module_from_spec(spec)
    from timm_selfconv import cli
    args = cli.parse_args(argv)
    if args.module not in ('recipe', 'zoo') or getattr(args, 'time', False):  # those read files alone
        spec.loader.exec_module(package)
    cli.run(args)


if __name__ == '__main__':
    main()
