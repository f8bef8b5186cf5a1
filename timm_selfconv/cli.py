"""The `timm-selfconv` command: one thin function a command."""
import argparse
import dataclasses
import importlib.util
import itertools
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Dict, List, Optional, Sequence

import timm
import torch.nn as nn
from safetensors import SafetensorError
from tabulate import tabulate
from timm.data import resolve_data_config

from timm_selfconv import hub, theory
from timm_selfconv.data import classify, open_dataset, open_images, preprocess
from timm_selfconv.files import write_new
from timm_selfconv.look import explorer
from timm_selfconv.look.heads import format_heads, report_heads
from timm_selfconv.measure import bench, counting, evaluation, tables

__all__ = ['main']

DEMO_MODEL = 'sa_quadratic_tiny_cifar'


def create_model(args: argparse.Namespace) -> nn.Module:
    """The net that a command was asked for, with its own weights or those of --checkpoint.

    Raises:
        ValueError: If there is no such net or checkpoint.
    """
    if not timm.is_model(args.model) and ':' not in args.model:  # hf-hub:org/name, local-dir:folder
        raise ValueError(f'model={args.model!r}: needs a registered model, see timm-selfconv list')
    if args.checkpoint is None:
        return timm.create_model(args.model, pretrained=True)
    if Path(args.checkpoint).is_dir():
        model = timm.create_model(args.model)
        hub.load_shards(model, args.checkpoint)
        return model
    if not Path(args.checkpoint).is_file():
        raise ValueError(f'checkpoint={args.checkpoint!r}: needs a weight file, or a folder of shards')
    try:
        return timm.create_model(args.model, pretrained=True, pretrained_cfg_overlay=dict(file=args.checkpoint))
    except (SafetensorError, EOFError, RuntimeError, UnpicklingError) as e:
        raise ValueError(f'checkpoint={args.checkpoint!r}: cannot be loaded ({e})') from e


def check_new(path: Path, option: str) -> None:
    """Raise a FileExistsError if a result is there already, before the work that it would take."""
    if path.exists():
        raise FileExistsError(f'{path} exists: remove it or choose another {option}')


def demo_pictures() -> List[Path]:
    """Ten pictures of CIFAR-10's test split that the package foolbox ships.

    Raises:
        ValueError: If foolbox is not installed.
    """
    spec = importlib.util.find_spec('foolbox')
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "no pictures to show: name some (timm-selfconv demo cat.jpg) or install the demo's: "
            "pip install 'timm_selfconv[demo]'")
    return sorted(Path(spec.submodule_search_locations[0], 'data').glob('cifar10_0*.png'))


def run_tables(args: argparse.Namespace) -> None:
    rows, results = tables.paper_tables(args.time), tables.results_rows()
    if args.json:
        print(json.dumps(dict(tables=rows, results=results), indent=2))
    else:
        print(f'{tables.format_tables(rows)}\n\nTest accuracies, published and here\n{tables.format_results(results)}')


def run_list(args: argparse.Namespace) -> None:
    rows = tables.zoo_rows()
    print(json.dumps(rows, indent=2) if args.json else tables.format_zoo(rows))


def run_classify(args: argparse.Namespace) -> None:
    model = create_model(args)
    results = classify(model, open_images(args.images))
    rows = [(Path(path).name, name, prob) for path, (name, prob) in zip(args.images, results)]
    print(tabulate(rows, headers=('picture', 'class', 'probability'), floatfmt='.3f'))


def run_demo(args: argparse.Namespace) -> None:
    args.model, args.checkpoint = DEMO_MODEL, None
    if not args.images:
        args.images = demo_pictures()
        print("Pictures of CIFAR-10's test split, with the number of their true class at the end of their names.")
    print(f'What {DEMO_MODEL} sees:\n')
    run_classify(args)
    print("\nThe paper's tables, published beside measured here:\n")
    print(tables.format_tables(tables.paper_tables()))


def run_eval(args: argparse.Namespace) -> None:
    result = evaluation.evaluate(
        create_model(args), args.data, split=args.split, batch_size=args.batch_size, data_dir=args.data_dir,
        input_key=args.input_key, target_key=args.target_key, device=args.device)
    if args.json:
        print(json.dumps(dict(model=args.model, **dataclasses.asdict(result)), indent=2))
        return
    print(f'{args.model}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f} on {result.images} images, '
          f'{result.images_per_second:.0f} images a second')
    print(tabulate(result.per_class.items(), headers=('class', 'accuracy'), floatfmt='.3f'))


def run_bench(args: argparse.Namespace) -> None:
    rows = []
    model = timm.create_model(args.model)
    for size in args.img_size:
        times = bench.bench_paths(model, size, batch_size=args.batch_size)
        rows.append((f'{size} x {size}', 1e3 * times.dense, 1e3 * times.fused, times.ratio))
    print(f'{args.model}, batch {args.batch_size}, eval, float32: explicit attention maps against the path that runs')
    print(tabulate(rows, headers=('images', 'maps [ms]', 'path [ms]', 'ratio'), floatfmt='.2f'))


def run_export(args: argparse.Namespace) -> None:
    for fact in args.fact:
        if '=' not in fact:
            raise ValueError(f'fact={fact!r}: needs KEY=VALUE')
    path = Path(args.output, f'{args.model}.safetensors')
    card = path.with_suffix('.md')
    for file in (path, card):
        check_new(file, '--output')
    hub.save_weights(create_model(args), path)
    try:
        saved = timm.create_model(args.model, pretrained=True, pretrained_cfg_overlay=dict(file=str(path)))
        result = evaluation.evaluate(saved, args.data)
        facts = dict(fact.split('=', 1) for fact in args.fact)
        write_new(card, hub.model_card(args.model, result.top1, result.images, facts).encode())
    except BaseException:
        path.unlink()  # no weights without a card
        raise
    print(f'{path}: top-1 {result.top1:.4f} on {result.images} images, card in {card}')


def parse_heads(heads: Sequence[str]) -> Dict[int, List[int]]:
    """Heads of each layer from LAYER:HEAD,HEAD words.

    Raises:
        ValueError: If a word is not of that form, or a layer stands twice.
    """
    parsed: Dict[int, List[int]] = {}
    for word in heads:
        match = re.fullmatch(r'(\d+):(\d+(?:,\d+)*)', word)
        if match is None or int(match[1]) in parsed:
            raise ValueError(f'heads={word!r}: needs LAYER:HEAD,HEAD, counted from 0, once for each layer')
        parsed[int(match[1])] = [int(head) for head in match[2].split(',')]
    return parsed


def format_degenerate(model: nn.Module, heads: Dict[int, List[int]], min_eigenvalue: float) -> str:
    """Why heads are degenerate, one a line."""
    rows = []
    for layer, eigenvalues in theory.precision_eigenvalues(model).items():
        conditions = theory.condition_numbers(eigenvalues).tolist()
        for head in heads.get(layer, []):
            largest = float(eigenvalues[head, 1])
            reason = 'all pixels alike' if largest < min_eigenvalue else 'a thin stripe'
            rows.append((layer, head, largest, conditions[head], reason))
    headers = ('layer', 'head dropped', 'largest eigenvalue', 'condition number', 'it attends to')
    return tabulate(rows, headers=headers, floatfmt='.2g')


def train_on_command(folder: Path) -> str:
    """The command that trains a pruned net on, from the folder that it was saved in."""
    config = json.loads((folder / 'config.json').read_text())
    model_kwargs = {
        'attn_drop_rate': 0.1,  # the recipe's: on the command line --model-kwargs replaces the recipe's altogether
        # train.py has arguments of its own for these
        **{k: v for k, v in config['model_args'].items() if k not in ('in_chans', 'num_classes', 'global_pool')}}
    return shlex.join([
        'python', 'train.py', '-c', 'recipes/pruned.yaml', '--model', config['architecture'],
        '--num-classes', str(config['num_classes']), '--initial-checkpoint', str(folder / 'model.safetensors'),
        '--model-kwargs', *(f'{k}={v!r}'.replace(' ', '') for k, v in model_kwargs.items())])


def run_prune(args: argparse.Namespace) -> None:
    folder = Path(args.output)
    check_new(folder, '--output')
    model = create_model(args)
    if args.heads:
        heads = parse_heads(args.heads)
        print(tabulate(heads.items(), headers=('layer', 'heads dropped')))
    else:
        heads = theory.degenerate_heads(model, args.min_eigenvalue, args.max_condition)
        if not heads:
            raise ValueError(f'model={args.model!r}: has no degenerate heads, nothing to prune')
        print(format_degenerate(model, heads, args.min_eigenvalue))

    pruned = theory.prune_heads(model, heads)
    input_size = resolve_data_config({}, model=model)['input_size']
    before, after = counting.count(model, input_size), counting.count(pruned, input_size)
    print('\n' + tabulate(
        [('parameters', f'{before.parameters:,}', f'{after.parameters:,}'),
         ("FLOPs, the paper's way", f'{before.linear_conv_flops:,}', f'{after.linear_conv_flops:,}'),
         ('FLOPs with attention', f'{before.flops:,}', f'{after.flops:,}')],
        headers=('', 'before', 'after'), disable_numparse=True, colalign=('left', 'right', 'right')))
    hub.save_folder(pruned, folder)
    print(f'\nUse it:      timm.create_model({f"local-dir:{folder}"!r}, pretrained=True)')
    print(f'Train it on: {train_on_command(folder)}')


def run_heads(args: argparse.Namespace) -> None:
    layers = report_heads(create_model(args), open_images(args.images), args.kernel_size)
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
    model = create_model(args)
    pictures = open_images(args.images)
    if args.data:
        dataset = open_dataset(args.data, args.split, args.data_dir, args.input_key, 'label')
        pictures = [dataset[i][0].convert('RGB') for i in range(min(args.count, len(dataset)))]
    images = preprocess(model, pictures) if pictures else None
    query = None if args.query is None else tuple(args.query)
    drawn = figures.draw_figures(model, images, [Path(image).stem for image in args.images], query)
    if args.run:
        drawn['training'] = figures.figure_training(figures.training_blobs(model, Path(args.run)))
    files = {Path(args.out, f'{name}.{args.format}'): figure for name, figure in drawn.items()}
    for file in files:
        check_new(file, '--out')
    for file, figure in files.items():
        figures.save_figure(figure, file)
        print(file)


def run_curves(args: argparse.Namespace) -> None:
    figures = import_figures()
    names = [Path(run).resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    runs = {name: figures.read_summary(run) for name, run in zip(names, args.runs)}
    figures.save_figure(figures.figure_accuracy(runs), args.out)


def distinct_names(names: Sequence[str]) -> List[str]:
    """The same names, numbered where one has stood before."""
    return [f'{name} ({names[:i].count(name) + 1})' if name in names[:i] else name for i, name in enumerate(names)]


def run_explore(args: argparse.Namespace) -> None:
    file, names = Path(args.out), [args.model, *args.versus]
    check_new(file, '--out')
    if len(args.checkpoint) > len(names):
        raise ValueError(f'checkpoint={args.checkpoint!r}: needs one for each of {names} at most')
    pictures = open_images(args.images)
    models = [
        create_model(argparse.Namespace(model=name, checkpoint=checkpoint))
        for name, checkpoint in itertools.zip_longest(names, args.checkpoint)]
    page = explorer.explorer_page(
        dict(zip(distinct_names(names), models)),
        dict(zip(distinct_names([Path(image).name for image in args.images]), pictures))).encode()
    write_new(file, page)
    print(f'{file}: {len(page) / 1e6:.1f} MB, open it in a browser')


def run_script(args: argparse.Namespace) -> None:
    """Run a timm script that has no --device-modules with the zoo registered, as if python had been called on it."""
    if not Path(args.script).is_file():
        raise ValueError(f"script={args.script!r}: needs a Python file, for example timm's validate.py")
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    runpy.run_path(args.script, run_name='__main__')


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='timm-selfconv', description=__doc__)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    def command(name: str, function, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    sub = command('demo', run_demo, 'classify a few real pictures with a shipped net and print the table')
    sub.add_argument('images', nargs='*', metavar='IMAGE', help='pictures of your own')

    sub = command('list', run_list, 'show the zoo: parameters, FLOPs, weights, accuracy, license')
    sub.add_argument('--json', action='store_true', help='for machines')

    sub = command('tables', run_tables, "print the papers' tables as published beside what is measured here")
    sub.add_argument('--time', action='store_true', help=(
        'measure the inference time of plain attention to hierarchical too, as a ratio (a minute)'))
    sub.add_argument('--json', action='store_true', help='for machines')

    sub = command('eval', run_eval, 'accuracy on a dataset')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--data', required=True, help="folder or timm dataset name, e.g. 'hfds/uoft-cs/cifar10'")
    sub.add_argument('--data-dir', help='where the files of a named dataset lie')
    sub.add_argument('--split', default='test', help='split of the dataset (default: test)')
    sub.add_argument('--checkpoint', help='weights of your own')
    sub.add_argument('--batch-size', type=int, default=64)
    sub.add_argument('--input-key', default='img', help='column of the images (default: img)')
    sub.add_argument('--target-key', default='label', help='column of the labels (default: label)')
    sub.add_argument('--device', default='cpu')
    sub.add_argument('--json', action='store_true', help='for machines')

    sub = command('classify', run_classify, 'most probable class of pictures')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('images', nargs='+', metavar='IMAGE')
    sub.add_argument('--checkpoint', help='weights of your own')

    sub = command('bench', run_bench, 'time the paths of attention against the explicit maps, as a ratio')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--img-size', type=int, nargs='+', default=[32, 64], help='sides of the images (default: 32 64)')
    sub.add_argument('--batch-size', type=int, default=8)

    sub = command('export', run_export, 'turn a training checkpoint into a weight file with a measured model card')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--checkpoint', required=True, help="checkpoint, e.g. timm's last.pth.tar")
    sub.add_argument('--data', required=True, help='CIFAR-10, as for eval')
    sub.add_argument('--output', required=True, metavar='DIR', help='folder of the new files')
    sub.add_argument('--fact', action='append', default=[], metavar='KEY=VALUE', help='a row of the card')

    sub = command('prune', run_prune, 'drop heads that look at all pixels alike or at a thin stripe, or heads you name')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--checkpoint', help='weights of your own')
    sub.add_argument('--output', required=True, metavar='DIR', help='new folder for the smaller net')
    sub.add_argument('--min-eigenvalue', type=float, default=1e-5, help=(
        "drop heads whose precision's largest eigenvalue is below this (default: 1e-5)"))
    sub.add_argument('--max-condition', type=float, default=1e5, help=(
        "drop heads whose precision's condition number is above this (default: 1e5; the released code: 1e3)"))
    sub.add_argument('--heads', nargs='+', metavar='LAYER:HEAD,HEAD', help='drop these instead, counted from 0')

    sub = command('heads', run_heads, 'what each head does, and how convolutional each layer is')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--checkpoint', help='weights of your own')
    sub.add_argument('--images', nargs='+', default=[], metavar='IMAGE', help=(
        'pictures to average over; needed by nets that look at content'))
    sub.add_argument('--kernel-size', type=int, default=3, help='side of the convolutions (default: 3)')
    sub.add_argument('--json', action='store_true', help='for machines')

    sub = command('figures', run_figures, "draw the papers' figures of a net: what its heads look at")
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('--out', required=True, metavar='DIR', help='folder of the new files')
    sub.add_argument('--checkpoint', help='weights of your own')
    sub.add_argument('--images', nargs='+', default=[], metavar='IMAGE', help=(
        'pictures to average over, and to draw figures of one by one'))
    sub.add_argument('--data', help='average over a dataset instead, a folder or name as for eval')
    sub.add_argument('--data-dir', help='where the files of a named dataset lie')
    sub.add_argument('--split', default='test', help='split of the dataset (default: test)')
    sub.add_argument('--input-key', default='img', help='column of the images (default: img)')
    sub.add_argument('--count', type=int, default=100, help='how many images of the dataset (default: 100)')
    sub.add_argument('--query', type=int, nargs=2, metavar=('ROW', 'COLUMN'), help=(
        "query, in pixels of the layers' grid (default: the middle)"))
    sub.add_argument('--run', metavar='DIR', help=(
        "a run of timm's train.py: draw the centres of attention at its checkpoints too (it keeps "
        '--checkpoint-hist of them)'))
    sub.add_argument('--format', choices=['png', 'svg', 'pdf'], default='png')

    sub = command('curves', run_curves, "draw test accuracy over epochs from the summary.csv of timm's train.py")
    sub.add_argument('runs', nargs='+', metavar='RUN', help='folder of a run')
    sub.add_argument('--out', required=True, metavar='FILE', help='new .png, .svg or .pdf file')

    sub = command('explore', run_explore, 'write a page that shows where every pixel of pictures looks, in all heads')
    sub.add_argument('model', metavar='MODEL')
    sub.add_argument('images', nargs='+', metavar='IMAGE')
    sub.add_argument('--out', required=True, metavar='FILE', help='the page, e.g. explorer.html')
    sub.add_argument('--versus', action='append', default=[], metavar='MODEL', help=(
        'another net beside it; may be given again'))
    sub.add_argument('--checkpoint', action='append', default=[], help=(
        'weights of your own; given again, those of each --versus in turn'))

    sub = command('run', run_script, "run a timm script (validate.py, benchmark.py, ...) with the zoo registered")
    sub.add_argument('script', metavar='SCRIPT')
    sub.add_argument('args', nargs=argparse.REMAINDER, metavar='ARGS')
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = create_parser()
    args = parser.parse_args(argv)
    try:
        args.function(args)
    except (ValueError, FileExistsError, RuntimeError) as e:
        if args.function is run_script and Path(args.script).is_file():
            raise  # a script's errors are its own
        parser.exit(2, f'timm-selfconv: {e}\n')
