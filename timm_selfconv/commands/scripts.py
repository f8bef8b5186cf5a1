"""The trainer, and timm's own scripts: train, run."""
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path

from timm_selfconv.train import add_train, run_train

__all__ = ['add_run', 'add_train', 'run_run', 'run_train']


def add_run(parser: ArgumentParser) -> None:
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('args', nargs=REMAINDER, metavar='ARGS')


def run_run(args: Namespace) -> None:
    """Run a timm script (validate.py, benchmark.py, ...) with the zoo registered."""
    if not Path(args.script).is_file():
        raise ValueError(f"script={args.script!r}: needs a Python file, for example timm's validate.py")
    import timm_selfconv.models  # noqa: F401

    sys.argv = [args.script, *args.args]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        runpy.run_path(args.script, run_name='__main__')
    except Exception:  # a script's errors are its own
        traceback.print_exc()
        sys.exit(1)
