"""The command ``timm-selfconv``, with a parser for the commands in :mod:`timm_selfconv.commands`."""
import argparse
import importlib
import inspect
import io
import logging
import os
import sys
import textwrap
import warnings
from typing import NoReturn, Optional, Sequence

from .version import __version__

__all__ = ['main']

MODULES = ('use', 'train', 'zoo', 'findings')  # modules of commands, in the order of --help


class Parser(argparse.ArgumentParser):
    """A parser with error messages of one line."""

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
    lines = ['Self-attention networks that can express any convolution, as timm models.']
    for group, members in COMMANDS.items():
        lines.append(f'\n{group}:')
        for name, (function, arguments) in members.items():
            text = inspect.getdoc(function) or ''
            lines.append(f'  {name:10}{text.splitlines()[0]}')
            command = commands.add_parser(name, description=text, formatter_class=raw)
            command.set_defaults(function=function)
            for argument in arguments:
                if isinstance(argument, list):
                    exclusive = command.add_mutually_exclusive_group()
                    for names, options in argument:
                        exclusive.add_argument(*names, **options)
                else:
                    command.add_argument(*argument[0], **argument[1])
    parser.description = '\n'.join(lines)
    return parser


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser()
    args, more = parser.parse_known_args(argv)
    if 'overrides' in args and all('=' in word and word[0] != '-' for word in more):
        args.overrides += more  # argparse does not collect KEY=VALUE after an option
    elif more:
        parser.error(f'unrecognized arguments: {" ".join(more)}')
    return args


def quieten() -> None:
    """Silence messages that libraries print on import, in profiles and before errors."""
    warnings.filterwarnings('ignore', '.torch.jit.', FutureWarning)  # of fvcore
    warnings.filterwarnings('ignore', r'Image size \(\d+ pixels\) exceeds')  # of PIL, for photographs of phones
    for name in ('torch.utils.cpp_extension', 'huggingface_hub.repocard'):  # no CUDA; no card of a dataset
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # start and stop of torch.profiler
    os.environ.setdefault('DATASETS_VERBOSITY', 'critical')  # errors are raised anyway


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command. Print one line for a mistake of the user (exit status 2), and the traceback of a bug."""
    quieten()  # before commands import these libraries
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == 'strict':
        sys.stdout.reconfigure(errors='backslashreplace')  # for file names in another encoding
    try:
        try:
            args = parse_args(argv)
            args.function(args)
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here, not at exit
    except BrokenPipeError:  # the reader stopped, for example head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, ImportError, FloatingPointError) as e:  # ImportError: a missing package
        diverged = isinstance(e, FloatingPointError)  # not a mistake of the user
        hint = '; try a smaller lr and another folder' if diverged else ''
        print(f'timm-selfconv: {textwrap.shorten(str(e), 700) or type(e).__name__}{hint}', file=sys.stderr)
        sys.exit(1 if diverged else 2)
