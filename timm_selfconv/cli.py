"""The command ``timm-selfconv``: its parser, from the commands in :mod:`timm_selfconv.commands`."""
import argparse
import importlib
import inspect
import logging
import os
import sys
import textwrap
import warnings
from typing import NoReturn, Optional, Sequence

from .version import __version__

__all__ = ['main']

MODULES = ('use', 'train', 'zoo', 'findings')  # of commands, in the order of --help
MOVED = dict(curves='figures --curves', recipe='list --recipes', tables='list --tables')  # commands of 0.2


class Parser(argparse.ArgumentParser):
    """Refuses arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {message}\n')


def create_parser() -> Parser:
    for module in MODULES:
        importlib.import_module(f'timm_selfconv.commands.{module}')
    from .commands._shared import COMMANDS

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog='timm-selfconv', usage='timm-selfconv COMMAND ... [--help]', formatter_class=raw)
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    commands = parser.add_subparsers(
        required=True, dest='command', metavar='COMMAND', prog=parser.prog, help=argparse.SUPPRESS)
    lines = ['Self-attention networks that contain every convolution, as timm models.']
    for group, members in COMMANDS.items():
        lines.append(f'\n{group}:')
        for name, (function, arguments) in members.items():
            text = inspect.getdoc(function) or ''
            lines.append(f'  {name:10}{text.splitlines()[0]}')
            command = commands.add_parser(name, description=text, formatter_class=raw)
            command.set_defaults(function=function)
            for argument in arguments:
                exclusive = isinstance(argument, list)
                target = command.add_mutually_exclusive_group() if exclusive else command
                for names, options in argument if isinstance(argument, list) else [argument]:
                    target.add_argument(*names, **options)
    parser.description = '\n'.join(lines)
    return parser


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser()
    command = next(iter(sys.argv[1:] if argv is None else argv), '')
    if command in MOVED:
        parser.error(f'{command}: is now timm-selfconv {MOVED[command]}')
    args, more = parser.parse_known_args(argv)
    if 'overrides' in args and all('=' in word and word[0] != '-' for word in more):
        args.overrides += more  # KEY=VALUE after an option, where argparse has closed the list
    elif more:
        parser.error(f'unrecognized arguments: {" ".join(more)}')
    return args


def quieten() -> None:
    """Silence messages that libraries print when they are imported, profile or fail."""
    warnings.filterwarnings('ignore', '.torch.jit.', FutureWarning)  # fvcore's focal loss
    warnings.filterwarnings('ignore', r'Image size \(\d+ pixels\) exceeds')  # PIL's, of a phone's photograph
    for name in ('torch.utils.cpp_extension', 'huggingface_hub.repocard'):  # no CUDA; a dataset's folder without a card
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # torch.profiler's start, stop, and that there is no GPU
    os.environ.setdefault('DATASETS_VERBOSITY', 'critical')  # its errors are raised, too


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command; a user's mistake ends in one line and exit status 2, anything else in its traceback."""
    quieten()  # before the commands import these libraries
    try:
        try:
            args = parse_args(argv)
            args.function(args)
        finally:
            sys.stdout.flush()  # after --help, too: here a broken pipe is caught, at exit it is not
    except BrokenPipeError:  # the reader left, as head does; no second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError, FloatingPointError) as e:  # ImportError: a package is not installed
        diverged = isinstance(e, FloatingPointError)  # no mistake of the user's
        hint = '; try a smaller lr, in another folder' if diverged else ''
        print(f'timm-selfconv: {textwrap.shorten(str(e), 700) or type(e).__name__}{hint}', file=sys.stderr)
        sys.exit(1 if diverged else 2)
