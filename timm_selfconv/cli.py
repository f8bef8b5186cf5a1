"""The command ``timm-selfconv``: collects the commands, each a module of :mod:`timm_selfconv.commands`."""
import argparse
import importlib
import logging
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NoReturn, Optional, Sequence

from .version import __version__

__all__ = ['main']


class Parser(argparse.ArgumentParser):
    """Refuses arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {message}\n')


def create_parser() -> Parser:
    parser = Parser(prog='timm-selfconv', description='Self-attention nets that contain every convolution: what the '
                    'zoo has, how good it is, and what its heads look at.')
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    commands = parser.add_subparsers(required=True, dest='command', metavar='COMMAND')
    files = sorted(Path(__file__).with_name('commands').glob('[!_]*.py'))
    modules = [vars(importlib.import_module(f'timm_selfconv.commands.{file.stem}')) for file in files]
    found = {name[4:]: module for module in modules for name in module if name.startswith('run_')}
    for name, module in sorted(found.items()):
        function = module[f'run_{name}']
        command = commands.add_parser(name, help=function.__doc__.rstrip('.'), description=function.__doc__)
        command.set_defaults(function=function)
        module[f'add_{name}'](command)
    return parser


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser()
    args, more = parser.parse_known_args(argv)
    if 'overrides' in args and all('=' in word and word[0] != '-' for word in more):
        args.overrides += more  # KEY=VALUE after an option, where argparse has closed the list
    elif more:
        parser.error(f'unrecognized arguments: {" ".join(more)}')
    return args


def quieten() -> None:
    """Turn off what libraries say of themselves while they are imported, profile or fail, beside a command's output."""
    warnings.filterwarnings('ignore', '.torch.jit.', FutureWarning)  # fvcore's focal loss
    warnings.filterwarnings('ignore', r'Image size \(\d+ pixels\) exceeds')  # PIL's, of a phone's photograph
    for name in ('torch.utils.cpp_extension', 'huggingface_hub.repocard'):  # no CUDA; a dataset's folder without a card
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # torch.profiler's start, stop, and that there is no GPU
    os.environ.setdefault('DATASETS_VERBOSITY', 'critical')  # its errors are raised, too


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command; what the user did wrong ends in one line and exit status 2, anything else in its traceback."""
    quieten()
    try:
        try:
            args = parse_args(argv)
            args.function(args)
        finally:
            sys.stdout.flush()  # after --help, too: here a broken pipe is caught, at exit it is not
    except BrokenPipeError:  # the reader left, as head does; no second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError) as e:  # the last: what is not installed
        print(f'timm-selfconv: {textwrap.shorten(str(e), 700) or type(e).__name__}', file=sys.stderr)
        sys.exit(2)
