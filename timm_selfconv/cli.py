"""The `timm-selfconv` command: the words that it understands. What they do is in :mod:`timm_selfconv.commands`."""
import argparse
import importlib
import logging
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, Optional, Sequence

from .commands.finetune import add_finetune

__all__ = ['main', 'parse_args', 'run']


def options(*flags: str, parents: Sequence[argparse.ArgumentParser] = (), **settings: Any) -> argparse.ArgumentParser:
    """An option that several commands share, as argparse takes it: a parent."""
    parser = argparse.ArgumentParser(add_help=False, parents=parents)
    if flags:
        parser.add_argument(*flags, **settings)
    return parser


def net_options() -> argparse.ArgumentParser:
    """Which net, and with which weights: the arguments of :func:`timm_selfconv.commands.nets.create_model`."""
    parser = options('model', metavar='MODEL', help='a name that timm-selfconv list shows, or local-dir:FOLDER')
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', metavar='FILE', help='weights of your own, or a folder of shards')
    weights.add_argument('--untrained', action='store_true', help='take the net as it is before any training')
    parser.add_argument('--seed', type=int, default=42, help='of --untrained (default: 42)')
    return parser


def data_options(split: str = 'test') -> argparse.ArgumentParser:
    """Which images of a dataset: arguments of :func:`timm_selfconv.data.open_dataset`."""
    parser = options('--data-dir', help='where the files of a named dataset lie')
    parser.add_argument('--split', default=split, help=f'split of the dataset (default: {split})')
    parser.add_argument('--input-key', default='img', help='column of the images (default: img)')
    return parser


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='timm-selfconv', description='Self-attention nets that contain every '
                                     'convolution: what the zoo has, how good it is, and what its heads look at.')
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    net, data, json = net_options(), data_options(), options('--json', action='store_true', help='for machines')
    fuse = options('--fuse', type=float, nargs='?', const=0., metavar='TOLERANCE', help=(
        'run the net fused for inference, its attention maps off by at most TOLERANCE (default: rounding alone)'))
    wide = options('--wide', action='store_true', help='all columns, not those alone that fit in 100 characters')

    def command(module: str, name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=parents)
        sub.set_defaults(module=module)
        return sub

    sub = command('look', 'demo', 'classify a few real pictures with a shipped net and print the tables', json)
    sub.add_argument('images', nargs='*', metavar='IMAGE', help='pictures of your own')

    command('zoo', 'list', 'show the zoo: parameters, FLOPs, weights, accuracy', json, wide)

    sub = command('zoo', 'tables', "print the papers' tables as published beside what is measured here", json, wide)
    sub.add_argument('--time', action='store_true', help=(
        'measure the inference time of plain attention to hierarchical too, as a ratio (a minute)'))

    sub = command('recipe', 'recipe', 'print where the file of a recipe lies, to train by')
    sub.add_argument('name', metavar='NAME', help='e.g. paper: train.py -c $(timm-selfconv recipe paper)')

    sub = command('measure', 'eval', 'accuracy on a dataset', net, fuse, data, json)
    sub.add_argument('--data', required=True, help="folder or timm dataset name, e.g. 'hfds/uoft-cs/cifar10'")
    sub.add_argument('--batch-size', type=int, default=64)
    sub.add_argument('--target-key', default='label', help='column of the labels (default: label)')
    sub.add_argument('--class-map', metavar='FILE', help=(
        "timm's class map, a class name per line; without it classes are matched by their names"))
    sub.add_argument('--device', default='cpu')

    sub = command('look', 'classify', 'most probable class of pictures', net, fuse, json)
    sub.add_argument('images', nargs='+', metavar='IMAGE')

    sub = command('measure', 'bench', 'speed and memory, beside the released algorithm and the net\'s matrix products',
                  net, fuse, json)
    sub.add_argument('--img-size', type=int, nargs='+', default=[32], help='sides of the images (default: 32)')
    sub.add_argument('--batch-size', type=int, nargs='+', default=[1, 4, 32], help='images per batch (default: 1 4 32)')
    sub.add_argument('--dtype', nargs='+', default=['float32'], help='float32 (default), bfloat16 or both')
    sub.add_argument('--train', action='store_true', help='forward, loss and backward instead of eval forwards')
    sub.add_argument('--against', choices=['operators'], help='time the net without its kernels too')
    sub.add_argument('--threads', type=int, help='how many of the CPU (default: as torch chooses)')
    sub.add_argument('--seconds', type=float, default=3., help=(
        'each is run for, at least, unless turns have taken ten times as long (default: 3)'))

    sub = command('weights', 'export', 'turn a training checkpoint into a weight file with a measured model card')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--checkpoint', required=True, help="checkpoint, e.g. timm's last.pth.tar")
    sub.add_argument('--data', required=True, help='CIFAR-10, as for eval')
    sub.add_argument('--output', required=True, metavar='DIR', help='folder of the new files')
    sub.add_argument('--fact', action='append', default=[], metavar='KEY=VALUE', help='a row of the card')

    sub = command('weights', 'include', 'turn a net into a richer one that computes the same, to train it on', net)
    sub.add_argument('target', metavar='TARGET', help='name of the richer net, e.g. sa_learned_content_cifar')
    sub.add_argument('--output', required=True, metavar='DIR', help='new folder for the richer net')

    sub = command(
        'weights', 'prune', 'drop heads that look at all pixels alike or at a thin stripe, or heads you name, or those '
        'whose work the others can do', net, data_options('train'), json)
    sub.add_argument('--output', required=True, metavar='DIR', help='new folder for the smaller net')
    sub.add_argument('--min-eigenvalue', type=float, default=1e-5, help=(
        "drop heads whose precision's largest eigenvalue is below this (default: 1e-5)"))
    sub.add_argument('--max-condition', type=float, default=1e5, help=(
        "drop heads whose precision's condition number is above this (default: 1e5; the released code: 1e3)"))
    which = sub.add_mutually_exclusive_group()
    which.add_argument('--heads', nargs='+', metavar='LAYER:HEAD,HEAD', help='drop these instead, counted from 0')
    which.add_argument('--keep', type=int, nargs='+', metavar='HEADS', help=(
        'keep so many of each layer instead, which take over what the others did on images of --data'))
    sub.add_argument('--data', help='folder or name as for eval')
    sub.add_argument('--count', type=int, default=100, help='how many images of it (default: 100)')

    sub = command('finetune', 'finetune', 'train a net on a folder of pictures, a folder a class, for these classes')
    add_finetune(sub)

    sub = command('look', 'heads', 'what each head does, and how convolutional each layer is', net, json)
    sub.add_argument('--images', nargs='+', default=[], metavar='IMAGE', help=(
        'pictures to average over; needed by nets that look at content'))
    sub.add_argument('--kernel-size', type=int, default=3, help='side of the convolutions (default: 3)')

    sub = command('look', 'figures', "draw the papers' figures of a net: what its heads look at", net, data)
    sub.add_argument('--out', required=True, metavar='DIR', help='new folder of the files')
    sub.add_argument('--images', nargs='+', default=[], metavar='IMAGE', help=(
        'pictures to average over, and to draw figures of one by one'))
    sub.add_argument('--data', help='average over a dataset instead, a folder or name as for eval')
    sub.add_argument('--count', type=int, default=100, help='how many images of the dataset (default: 100)')
    sub.add_argument('--query', type=int, nargs=2, metavar=('ROW', 'COLUMN'), help=(
        "query, in pixels of the layers' grid (default: the middle)"))
    sub.add_argument('--run', metavar='RUN', help=(
        'draw where the heads looked over training too: a net whose history ships, or the folder of a run (of timm\'s '
        'train.py, at the checkpoints that it kept)'))
    sub.add_argument('--format', choices=['png', 'svg', 'pdf'], default='png')

    sub = command('look', 'curves', 'draw test accuracy over epochs of nets whose histories ship, and of runs')
    sub.add_argument('runs', nargs='+', metavar='RUN', help="a net, or the folder of a run (timm's train.py's too)")
    sub.add_argument('--out', required=True, metavar='FILE', help='new .png, .svg or .pdf file')

    sub = command('look', 'explore', 'write a page that shows where every pixel of pictures looks, in all heads')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('images', nargs='+', metavar='IMAGE')
    sub.add_argument('--out', required=True, metavar='FILE', help='the page, e.g. explorer.html')
    sub.add_argument('--labels', nargs='+', default=[], metavar='CLASS', help='true class of each picture')
    sub.add_argument('--versus', action='append', default=[], metavar='MODEL', help=(
        'another net beside it; may be given again'))
    sub.add_argument('--checkpoint', action='append', default=[], metavar='FILE', help=(
        'weights of your own; given again, those of each --versus in turn'))
    sub.add_argument('--untrained', action='store_true', help='nets without --checkpoint as they are before training')
    sub.add_argument('--seed', type=int, default=42, help='of --untrained (default: 42)')

    sub = command('publish', 'publish', 'bring nets and their pages to the Hub, one commit of what has changed each')
    sub.add_argument('models', nargs='*', metavar='MODEL', help='nets that have weights (default: all)')
    target = sub.add_mutually_exclusive_group(required=True)
    target.add_argument('--owner', metavar='ORG', help='whose repositories; log in with: hf auth login')
    target.add_argument('--folder', metavar='DIR', help='write the repositories here instead')
    sub.add_argument('--images', nargs='+', default=[], metavar='IMAGE', help=(
        'pictures that the explorers show (default: two of those of demo)'))
    sub.add_argument('--dry-run', action='store_true', help='say what would change')
    sub.add_argument('--private', action='store_true', help='make new repositories that their owner alone can see')

    sub = command('scripts', 'run', "run a timm script (validate.py, benchmark.py, ...) with the zoo registered")
    sub.add_argument('script', metavar='SCRIPT')
    sub.add_argument('args', nargs=argparse.REMAINDER, metavar='ARGS')
    return parser


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser()
    args, rest = parser.parse_known_args(argv)
    if 'overrides' in args and not any(word.startswith('-') for word in rest):
        args.overrides += rest  # behind an option; argparse does not mix the two in subcommands
    elif rest:
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    return args


def quieten() -> None:
    """Turn off what libraries say of themselves while they are imported, profile or fail, beside a command's output."""
    warnings.filterwarnings('ignore', '.torch.jit.script. is deprecated', FutureWarning)  # fvcore's focal loss
    logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)  # no CUDA beside torch.utils.benchmark
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # torch.profiler's start, stop, and that there is no GPU
    os.environ.setdefault('DATASETS_VERBOSITY', 'critical')  # its errors are raised, too


def run(args: argparse.Namespace) -> None:
    """Run a command; what the user did wrong ends in one line and exit status 2, anything else in its traceback."""
    quieten()
    try:
        module = importlib.import_module(f'timm_selfconv.commands.{args.module}')
        getattr(module, f'run_{args.command}')(args)
        sys.stdout.flush()
    except (ValueError, OSError) as e:
        if args.command == 'run' and Path(args.script).is_file():
            raise  # a script's errors are its own
        if isinstance(e, BrokenPipeError):  # the reader left, as head does; no second error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        print(f'timm-selfconv: {textwrap.shorten(str(e), 700) or type(e).__name__}', file=sys.stderr)
        sys.exit(2)


def main(argv: Optional[Sequence[str]] = None) -> None:
    run(parse_args(argv))
