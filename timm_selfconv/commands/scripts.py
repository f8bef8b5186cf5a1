"""timm's own scripts: run."""
import argparse
import runpy
import sys
from pathlib import Path


def run_run(args: argparse.Namespace) -> None:
    """Run a timm script that has no --device-modules with the zoo registered, as if python had been called on it."""
    if not Path(args.script).is_file():
        raise ValueError(f"script={args.script!r}: needs a Python file, for example timm's validate.py")
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    runpy.run_path(args.script, run_name='__main__')
