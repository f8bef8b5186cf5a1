"""What a net sees: classify, demo, heads, figures, curves, explore."""
import argparse
import dataclasses
import importlib.util
import itertools
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Sequence

from tabulate import tabulate

from timm_selfconv.data import classify, open_images, preprocess, sample_pictures
from timm_selfconv.files import check_new, write_new
from timm_selfconv.look import explorer
from timm_selfconv.look.captions import net_caption
from timm_selfconv.look.heads import format_heads, report_heads
from timm_selfconv.measure import tables
from timm_selfconv.models import CIFAR10_CLASSES
from .nets import create_model, fused

DEMO_MODEL = 'sa_quadratic_tiny_cifar'


def run_classify(args: argparse.Namespace) -> None:
    model = fused(create_model(args.model, args.checkpoint, args.untrained, args.seed), args.fuse)
    results = classify(model, open_images(args.images))
    rows: List[Dict[str, Any]] = [
        {'picture': Path(path).name, 'class': name, 'probability': prob}
        for path, (name, prob) in zip(args.images, results)]
    print(json.dumps(rows, indent=2) if args.json else tabulate(rows, headers='keys', floatfmt='.3f'))


def demo_pictures() -> List[Path]:
    """Ten pictures of CIFAR-10's test split that the package foolbox ships, cifar10_NUMBER_LABEL.png.

    Raises:
        ValueError: If foolbox is not installed.
    """
    spec = importlib.util.find_spec('foolbox')
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "no pictures to show: name some (timm-selfconv demo cat.jpg) or install the demo's: "
            "pip install 'timm_selfconv[demo]'")
    return sorted(Path(spec.submodule_search_locations[0], 'data').glob('cifar10_0*.png'))


def run_demo(args: argparse.Namespace) -> None:
    paths = [Path(image) for image in args.images] or demo_pictures()
    truth = [] if args.images else [CIFAR10_CLASSES[int(path.stem.split('_')[-1])] for path in paths]
    results = classify(create_model(DEMO_MODEL), open_images(paths))
    rows: List[Dict[str, Any]] = [
        {'picture': path.name, **({'true class': true} if true else {}), 'class': name, 'probability': prob}
        for path, true, (name, prob) in itertools.zip_longest(paths, truth, results)]
    if args.json:
        print(json.dumps(dict(model=DEMO_MODEL, pictures=rows, tables=tables.paper_tables()), indent=2))
        return
    print(f'What {DEMO_MODEL} sees' + (" in ten pictures of CIFAR-10's test split:\n" if truth else ':\n'))
    print(tabulate(rows, headers='keys', floatfmt='.3f'))
    print("\nThe papers' tables, published beside measured here:\n")
    print(tables.format_tables(tables.paper_tables()))
    command = shlex.join(['timm-selfconv', 'explore', DEMO_MODEL, *map(str, paths), '--out', 'explorer.html'])
    print(f'\nWhere every pixel of these pictures looks:\n{command}')


def run_heads(args: argparse.Namespace) -> None:
    pictures = open_images(args.images)
    layers = report_heads(
        create_model(args.model, args.checkpoint, args.untrained, args.seed), pictures, args.kernel_size)
    if args.json:
        reports = [dataclasses.asdict(layer) for layer in layers]
        print(json.dumps(dict(model=args.model, kernel_size=args.kernel_size, layers=reports), indent=2))
    else:
        print(format_heads(layers, args.kernel_size))


def import_figures() -> ModuleType:
    """The figures, which need matplotlib: imported by the commands that draw alone.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    try:
        from timm_selfconv.look import figures
    except ImportError as e:
        raise ValueError(str(e)) from e
    return figures


def run_figures(args: argparse.Namespace) -> None:
    figures = import_figures()
    if args.images and args.data:
        raise ValueError('images and data: name pictures or a dataset, not both')
    if args.count < 1:
        raise ValueError(f'count={args.count}: needs at least 1')
    check_new(args.out)
    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    pictures = open_images(args.images)
    if args.data:
        pictures = sample_pictures(args.data, args.split, args.data_dir, args.input_key, args.count)
    images = preprocess(model, pictures) if pictures else None
    query = None if args.query is None else tuple(args.query)
    net = f'{args.model}: {net_caption(args.model, args.checkpoint, args.untrained)}'
    names = [Path(image).stem for image in args.images]
    drawn = figures.draw_figures(model, images, names, query, net, args.run)
    for file in figures.save_figures(drawn, args.out, args.format):
        print(file)


def run_curves(args: argparse.Namespace) -> None:
    figures = import_figures()
    names = [Path(run).resolve().name if Path(run).is_dir() else run for run in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    runs = {name: figures.read_accuracies(run) for name, run in zip(names, args.runs)}
    figures.save_figure(figures.figure_accuracy(runs), args.out)


def distinct_names(names: Sequence[str]) -> List[str]:
    """The same names, numbered where one has stood before."""
    return [f'{name} ({names[:i].count(name) + 1})' if name in names[:i] else name for i, name in enumerate(names)]


def run_explore(args: argparse.Namespace) -> None:
    file, names = Path(args.out), [args.model, *args.versus]
    check_new(file)
    if len(args.checkpoint) > len(names):
        raise ValueError(f'checkpoint={args.checkpoint!r}: needs one for each of {names} at most')
    pictures = open_images(args.images)
    models = [
        create_model(name, checkpoint, args.untrained and checkpoint is None, args.seed)
        for name, checkpoint in itertools.zip_longest(names, args.checkpoint)]
    page = explorer.explorer_page(
        dict(zip(distinct_names(names), models)),
        dict(zip(distinct_names([Path(image).name for image in args.images]), pictures)),
        args.labels,
        [net_caption(name, checkpoint, args.untrained and checkpoint is None)
         for name, checkpoint in itertools.zip_longest(names, args.checkpoint)],
        [Path(checkpoint).parent if checkpoint else None if args.untrained else name
         for name, checkpoint in itertools.zip_longest(names, args.checkpoint)]).encode()
    write_new(file, page)
    print(f'{file}: {len(page) / 1e6:.1f} MB, open it in a browser')
