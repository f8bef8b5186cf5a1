"""Commands that use a net: demo, classify, explore, heads, figures, theorem."""
import importlib.util
import shlex
import sys
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import List, Sequence

from tabulate import tabulate
from tqdm import tqdm

from timm_selfconv.data import label_names, open_images, preprocess, sample_pictures, top_classes
from timm_selfconv.files import PICTURES, picture_files, write_new
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.look.heads import format_heads, report_heads
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.measure import tables
from timm_selfconv.models import CIFAR10_CLASSES
from ._shared import (
    COUNT, INPUT_KEY, JSON, NET, SPLIT, argument, caption, command, create_model, images, load_model, natural, output,
    show,
)

GROUP = 'use a net'
DEMO_MODEL = 'sa_quadratic_tiny_cifar'


def demo_pictures() -> List[Path]:
    spec = importlib.util.find_spec('foolbox')
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the pictures of the demo are in the package foolbox: pip install 'timm_selfconv[demo]'")
    return sorted(Path(spec.submodule_search_locations[0], 'data').glob('cifar10_0*.png'))


@command(GROUP)
def demo(args: Namespace) -> None:
    """Classify ten pictures with a small net, and print the tables of both papers.

    Example: timm-selfconv demo
    """
    paths = demo_pictures()
    results = top_classes(create_model(DEMO_MODEL), open_images(paths), 1)
    rows = [(path.name, CIFAR10_CLASSES[int(path.stem.split('_')[-1])], *best) for path, (best,) in zip(paths, results)]
    table = tabulate(rows, ('picture', 'true class', 'class', 'probability'), floatfmt='.3f')
    line = shlex.join(['timm-selfconv', 'explore', DEMO_MODEL, *map(str, paths), '--output', 'explorer.html'])
    print(f"{DEMO_MODEL} on ten test images of CIFAR-10:\n\n{table}\n\n"
          f"The papers' tables, with numbers measured here:\n\n{tables.format_tables(tables.paper_tables())}\n\n"
          f'Show the attention maps of these pictures:\n{line}')


def find_pictures(words: Sequence[str]) -> List[Path]:
    paths = [path for word in words for path in (picture_files(word) if Path(word).is_dir() else [Path(word)])]
    for path in paths:
        if not path.is_file():
            raise ValueError(f'{path}: no such file')
    if not paths:
        raise ValueError(f'images={words}: needs at least one picture ({", ".join(PICTURES)})')
    return paths


@command(
    GROUP, *NET, argument('images', nargs='+', metavar='IMAGE', help='pictures, or folders of pictures'),
    argument('--topk', type=natural, default=1, metavar='K', help='number of classes per picture (default: 1)'), JSON)
def classify(args: Namespace) -> None:
    """Classify pictures.

    Example: timm-selfconv classify sa_quadratic_tiny_cifar cat.jpg --topk 3
    """
    paths = find_pictures(args.images)
    model = load_model(args)
    rows, errors = [], []
    for path in tqdm(paths, unit='picture', leave=False, disable=None):
        try:
            image, = open_images([path])
        except ValueError as e:
            errors.append(f'timm-selfconv: {e}')
        else:
            best, = top_classes(model, [image], args.topk)
            rows += [{'picture': str(path), 'class': name, 'probability': prob} for name, prob in best]
    table = rows and tabulate(rows, headers='keys', floatfmt='.3f', disable_numparse=[0, 1])
    names = textwrap.shorten(', '.join(label_names(model)) or 'unnamed', 400)
    if rows or args.json:
        show(args, rows, f'{table}\n\nThe net has {model.num_classes} classes: {names}')
    if errors:
        print('\n'.join(errors), file=sys.stderr)
        sys.exit(1)


def distinct_names(names: Sequence[str]) -> List[str]:
    return [f'{name} ({names[:i].count(name) + 1})' if name in names[:i] else name for i, name in enumerate(names)]


@command(
    GROUP, *NET, images('pictures to show'), output('FILE', 'HTML file, e.g. explorer.html'))
def explore(args: Namespace) -> None:
    """Write an HTML page with the attention maps of all heads, for every pixel of your pictures.

    Example: timm-selfconv explore sa_learned_content_tiny_cifar cat.jpg --output explorer.html
    """
    pictures = dict(zip(distinct_names([image.name for image in args.images]), open_images(args.images)))
    run = args.checkpoint.parent if args.checkpoint else None if args.untrained else args.model
    page = explorer_page(load_model(args), pictures, args.model, caption(args), run)
    write_new(args.output, page.encode())
    print(f'{args.output}: {len(page) / 1e6:.1f} MB, open it in a browser')


@command(
    GROUP, *NET, images(
        'pictures to average over; required if attention depends on content', name='--images'),
    argument('--kernel-size', type=natural, default=3, help='kernel size to compare with (default: 3)'), JSON)
def heads(args: Namespace) -> None:
    """Describe each head, and measure how close each layer is to a convolution.

    Example: timm-selfconv heads sa_learned_tiny_cifar
    """
    layers = report_heads(load_model(args), open_images(args.images), args.kernel_size)
    show(args, dict(model=args.model, kernel_size=args.kernel_size, layers=layers),
         format_heads(layers, args.kernel_size))


@command(
    GROUP, *NET, [
        images('pictures to average over, and to draw one by one', name='--images'),
        argument('--data', help='dataset to average over instead, as for eval')],
    SPLIT, INPUT_KEY, COUNT, output('DIR', 'new folder for the figures'),
    argument('--query', type=int, nargs=2, metavar=('ROW', 'COLUMN'), help=(
        'query pixel in the grid of the first layer (default: the middle)')),
    argument('--run', metavar='RUN', help=(
        'also draw the heads during training; RUN is a shipped net with a history, or the folder of a run')),
    argument('--curves', nargs='*', metavar='RUN', help=(
        'also draw accuracy and loss over epochs; each RUN is as for --run, and runs with the same NAME in NAME.SEED '
        'become one curve (default: the shipped runs of curves.yaml)')),
    argument('--format', choices=['png', 'svg', 'pdf'], default='png', help='file format (default: png)'))
def figures(args: Namespace) -> None:
    """Draw the papers' figures for a net: heads, attention maps, training.

    Example: timm-selfconv figures sa_learned_tiny_cifar --run sa_learned_tiny_cifar --output figures
    """
    from timm_selfconv.look import figures as drawing

    if args.output.suffix in ('.png', '.svg', '.pdf'):
        raise ValueError(f"output='{args.output}': needs the name of a folder; --format sets the file format")
    curves = None if args.curves is None else drawing.read_curves(args.curves or drawing.shipped_curves())
    model = load_model(args)
    pictures = open_images(args.images)
    if args.data:
        pictures = sample_pictures(args.data, args.split, args.input_key, args.count)
    drawn = drawing.draw_figures(
        model, preprocess(model, pictures) if pictures else None, [image.stem for image in args.images],
        args.query and tuple(args.query), f'{args.model}: {caption(args)}', args.run)
    if curves is not None:
        drawn['curves'] = drawing.figure_accuracy(curves)
    for file in drawing.save_figures(drawn, args.output, args.format):
        print(file)


@command(GROUP, images('picture to convolve (default: a cat)', '?'), output('FILE', 'HTML file, e.g. theorem.html'))
def theorem(args: Namespace) -> None:
    """Write an HTML page that shows how attention heads add up to a convolution.

    Example: timm-selfconv theorem --output theorem.html
    """
    page = theorem_page(*(open_images([args.images])[0], args.images.name) if args.images else ()).encode()
    write_new(args.output, page)
    print(f'{args.output}: {len(page) / 1e3:.0f} kB, open it in a browser')
