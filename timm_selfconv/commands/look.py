"""Predictions and attention: classify, demo, heads, figures, curves, explore."""
import dataclasses
import glob
import importlib.util
import itertools
import json
import shlex
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import List, Sequence

from tabulate import tabulate
from tqdm import tqdm

from timm_selfconv.files import PICTURES
from ._shared import add_data, add_fuse, add_model, add_output, checkpoint, create_model, fused, model_name, natural, \
    picture

DEMO_MODEL = 'sa_quadratic_tiny_cifar'


def add_classify(parser: ArgumentParser) -> None:
    add_model(parser)
    add_fuse(parser)
    parser.add_argument('images', nargs='+', metavar='IMAGE', help=(
        "pictures, folders of them, patterns like 'cats/*.jpg', or - for paths on standard input, one a line"))
    parser.add_argument('--topk', type=natural, default=1, metavar='K', help='classes of each picture (default: 1)')
    parser.add_argument('--json', action='store_true', help='print JSON')


def find_pictures(words: Sequence[str]) -> List[str]:
    """The paths that files, folders, patterns and standard input name; a ValueError if none is a file."""
    paths: List[str] = []
    for word in words:
        if word == '-':
            paths += filter(None, sys.stdin.read().splitlines())
        elif Path(word).is_dir():
            paths += [str(file) for file in sorted(Path(word).rglob('*')) if file.suffix.lower() in PICTURES]
        else:
            found = [] if Path(word).exists() else sorted(glob.glob(word, recursive=True))
            paths += [path for path in found if not Path(path).is_dir()] or [word]
    if not any(Path(path).is_file() for path in paths):
        raise ValueError(f'images={words}: needs at least one picture file, or a folder with {", ".join(PICTURES)}')
    return paths


def run_classify(args: Namespace) -> None:
    """Name the most probable classes of pictures."""
    paths = find_pictures(args.images)
    from timm_selfconv.data import label_names, open_images, top_classes
    from timm_selfconv.models import CIFAR10_CLASSES

    model = fused(create_model(args.model, args.checkpoint, args.untrained, args.seed), args.fuse)
    rows, errors = [], []
    for path in tqdm(paths, unit='picture', leave=False, disable=None):
        try:
            images = open_images([path])
        except ValueError as e:
            errors.append(f'timm-selfconv: {e}')
            continue
        (best,) = top_classes(model, images, args.topk)
        rows += [{'picture': path, 'class': name, 'probability': prob} for name, prob in best]
    if args.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        names = label_names(model)
        known = "CIFAR-10's ten classes" if names == CIFAR10_CLASSES else f'{model.num_classes} classes'
        told = textwrap.shorten(f'This net takes each picture for one of {known}: {", ".join(names) or "unnamed"}', 400)
        print(f"{tabulate(rows, headers='keys', floatfmt='.3f', disable_numparse=[0, 1])}\n\n{told}")
    if errors:
        print('\n'.join(errors), file=sys.stderr)
        sys.exit(1)


def add_demo(parser: ArgumentParser) -> None:
    parser.add_argument('images', nargs='*', type=picture, metavar='IMAGE', help='pictures of your own')
    parser.add_argument('--json', action='store_true', help='print JSON')


def demo_pictures() -> List[Path]:
    """Ten pictures of CIFAR-10's test split that the package foolbox ships, cifar10_NUMBER_LABEL.png."""
    spec = importlib.util.find_spec('foolbox')
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "no pictures to show: name some (timm-selfconv demo cat.jpg) or install the demo's: "
            "pip install 'timm_selfconv[demo]'")
    return sorted(Path(spec.submodule_search_locations[0], 'data').glob('cifar10_0*.png'))


def run_demo(args: Namespace) -> None:
    """Classify a few real pictures with a shipped net and print the papers' tables."""
    paths = args.images or demo_pictures()
    from timm_selfconv.data import classify, open_images
    from timm_selfconv.measure import tables
    from timm_selfconv.models import CIFAR10_CLASSES

    truth = [] if args.images else [CIFAR10_CLASSES[int(path.stem.split('_')[-1])] for path in paths]
    results = classify(create_model(DEMO_MODEL), open_images(paths))
    rows = [{'picture': path.name, **({'true class': true} if true else {}), 'class': name, 'probability': prob}
            for path, true, (name, prob) in itertools.zip_longest(paths, truth, results)]
    if args.json:
        print(json.dumps(dict(model=DEMO_MODEL, pictures=rows, tables=tables.paper_tables()), indent=2))
        return
    print(f'What {DEMO_MODEL} sees' + (" in ten pictures of CIFAR-10's test split:\n" if truth else ':\n'))
    print(tabulate(rows, headers='keys', floatfmt='.3f'))
    print(f"\nThe papers' tables, published beside measured here:\n\n{tables.format_tables(tables.paper_tables())}")
    command = shlex.join(['timm-selfconv', 'explore', DEMO_MODEL, *map(str, paths), '--output', 'explorer.html'])
    print(f'\nWhere every pixel of these pictures looks:\n{command}')


def add_part(parser: ArgumentParser) -> None:
    parser.add_argument('--part', choices=['both', 'content', 'position'], default='both', help=(
        "what to see of ConViT's gated attention (default: both)"))


def add_heads(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument('--images', nargs='+', type=picture, default=[], metavar='IMAGE', help=(
        'pictures to average over; needed by nets that look at content'))
    parser.add_argument('--kernel-size', type=natural, default=3, help='side of the convolutions (default: 3)')
    add_part(parser)
    parser.add_argument('--json', action='store_true', help='print JSON')


def run_heads(args: Namespace) -> None:
    """Tell what each head does, and how convolutional each layer is."""
    from timm_selfconv.data import open_images
    from timm_selfconv.look.heads import format_heads, report_heads

    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    layers = report_heads(model, open_images(args.images), args.kernel_size, args.part)
    if args.json:
        reports = [dataclasses.asdict(layer) for layer in layers]
        print(json.dumps(dict(model=args.model, kernel_size=args.kernel_size, layers=reports), indent=2))
    else:
        print(format_heads(layers, args.kernel_size))


def add_figures(parser: ArgumentParser) -> None:
    add_model(parser)
    add_data(parser)
    add_output(parser, 'DIR', 'new folder of the files')
    over = parser.add_mutually_exclusive_group()
    over.add_argument('--images', nargs='+', type=picture, default=[], metavar='IMAGE', help=(
        'pictures to average over, and to draw figures of one by one'))
    over.add_argument('--data', help='average over a dataset instead, a folder or name as for eval')
    parser.add_argument('--count', type=natural, default=100, help='how many images of the dataset (default: 100)')
    parser.add_argument('--query', type=int, nargs=2, metavar=('ROW', 'COLUMN'), help=(
        "query, in pixels of the first layer's grid (default: the middle)"))
    add_part(parser)
    parser.add_argument('--versus', type=model_name, metavar='MODEL', help=(
        'draw its heads beside those of another net, which has its own weights'))
    parser.add_argument('--run', metavar='RUN', help=(
        'draw where the heads looked over training too: a net whose history ships, or the folder of a run (of timm\'s '
        'train.py, at the checkpoints that it kept)'))
    parser.add_argument('--format', choices=['png', 'svg', 'pdf'], default='png')


def run_figures(args: Namespace) -> None:
    """Draw the papers' figures of a net: what its heads look at."""
    if args.output.suffix in ('.png', '.svg', '.pdf'):
        raise ValueError(f"output='{args.output}': becomes a folder of files; name it, and their kind by --format")
    from timm_selfconv.look import figures
    from timm_selfconv.data import open_images, preprocess, sample_pictures
    from timm_selfconv.look.heads import report_heads
    from timm_selfconv.weights import net_caption

    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    pictures = open_images(args.images)
    if args.data:
        pictures = sample_pictures(args.data, args.split, args.data_dir, args.input_key, args.count)
    images = preprocess(model, pictures) if pictures else None
    query = None if args.query is None else tuple(args.query)
    net = f'{args.model}: {net_caption(args.model, args.checkpoint, args.untrained)}'
    versus = {}
    if args.versus:
        layers = report_heads(create_model(args.versus), pictures[:figures.REPORTED])
        versus = {f'{args.versus}: {net_caption(args.versus)}': layers}
    drawn = figures.draw_figures(
        model, images, [image.stem for image in args.images], query, net, args.run, args.part, versus)
    for file in figures.save_figures(drawn, args.output, args.format):
        print(file)


def add_curves(parser: ArgumentParser) -> None:
    parser.add_argument('runs', nargs='*', metavar='RUN', help=(
        "a net, or the folder of a run (timm's train.py's too); runs named NAME.SEED are one curve (default: those of "
        'curves.yaml that ship)'))
    add_output(parser, 'FILE', 'new .png, .svg or .pdf file')


def run_curves(args: Namespace) -> None:
    """Draw accuracy and loss over epochs of nets whose histories ship, and of runs."""
    from timm_selfconv.look import figures

    curves = figures.read_curves(args.runs or figures.shipped_curves())
    figures.save_figure(figures.figure_accuracy(curves), args.output)
    print(args.output)


def add_explore(parser: ArgumentParser) -> None:
    parser.add_argument('model', type=model_name, metavar='MODEL', help='a name, or local-dir:FOLDER')
    parser.add_argument('images', nargs='+', type=picture, metavar='IMAGE', help='pictures')
    add_output(parser, 'FILE', 'the page, e.g. explorer.html')
    parser.add_argument('--labels', nargs='+', default=[], metavar='CLASS', help='true class of each picture')
    parser.add_argument('--versus', action='append', type=model_name, default=[], metavar='MODEL', help=(
        'another net beside it; may be given again'))
    add_part(parser)
    parser.add_argument('--checkpoint', action='append', type=checkpoint, default=[], metavar='FILE', help=(
        'weights of your own; given again, those of each --versus in turn'))
    parser.add_argument('--untrained', action='store_true', help='nets without --checkpoint as before training')
    parser.add_argument('--seed', type=int, default=42, help='of --untrained (default: 42)')


def distinct_names(names: Sequence[str]) -> List[str]:
    """The same names, numbered where one has stood before."""
    return [f'{name} ({names[:i].count(name) + 1})' if name in names[:i] else name for i, name in enumerate(names)]


def run_explore(args: Namespace) -> None:
    """Write a page that shows where every pixel of pictures looks, in all heads."""
    names = [args.model, *args.versus]
    if len(args.checkpoint) > len(names):
        raise ValueError(f'checkpoint={args.checkpoint!r}: needs one for each of {names} at most')
    from timm_selfconv.data import open_images
    from timm_selfconv.files import write_new
    from timm_selfconv.weights import net_caption
    from timm_selfconv.look.explorer import explorer_page

    pictures = open_images(args.images)
    sources = [(name, checkpoint, args.untrained and checkpoint is None)
               for name, checkpoint in itertools.zip_longest(names, args.checkpoint)]
    page = explorer_page(
        dict(zip(distinct_names(names), [create_model(*source, args.seed) for source in sources])),
        dict(zip(distinct_names([image.name for image in args.images]), pictures)),
        args.labels, [net_caption(*source) for source in sources],
        [Path(checkpoint).parent if checkpoint else None if args.untrained else name
         for name, checkpoint, _ in sources], args.part).encode()
    write_new(args.output, page)
    print(f'{args.output}: {len(page) / 1e6:.1f} MB, open it in a browser')
