"""Commands for the zoo: list, bench, export, publish, run."""
import re
import runpy
import shutil
import sys
import tempfile
import traceback
from argparse import REMAINDER, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import timm
import torch
from tabulate import tabulate
from tqdm import tqdm
from tqdm.contrib.itertools import product

from timm_selfconv.data import data_name, label_names
from timm_selfconv.files import check_new, replace_file, sha256, write_new
from timm_selfconv.measure import bench as benchmark
from timm_selfconv.measure import tables
from timm_selfconv.measure.counting import count
from timm_selfconv.measure.evaluation import evaluate, find_device, is_cifar10_test
from timm_selfconv.training.recipes import RECIPES, find_recipe
from timm_selfconv.weights import card_facts, card_path, checksums, publishing, saving, tagged_name, weights_path
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from ._shared import (
    DEVICE, JSON, NET, argument, command, create_model, existing_file, load_model, model_name, natural, output, show,
)

GROUP = 'maintain the zoo'


@command(
    GROUP, argument('--tables', action='store_true', help="print the tables of both papers, with our numbers"),
    argument('--recipes', nargs='?', const='', metavar='NAME', help='list the recipes, or print the path of one'), JSON)
def list_(args: Namespace) -> None:
    """List the nets, the tables of both papers, or the recipes.

    Example: timm-selfconv list --tables
    """
    if args.recipes:
        path = str(find_recipe(args.recipes))
        show(args, path, path)
    elif args.recipes is not None:
        about = {file.stem: file.read_text().splitlines()[0].lstrip('# ') for file in sorted(RECIPES.glob('*.yaml'))}
        show(args, about, '\n'.join(f'{name:16}{text}' for name, text in about.items()))
    elif args.tables:
        rows = tables.paper_tables()
        show(args, rows, tables.format_tables(rows))
    else:
        rows = tables.zoo_rows()
        show(args, rows, tables.format_zoo(rows))


@command(
    GROUP, *NET, argument('--img-size', type=natural, nargs='+', help=(
        'image sizes in pixels (default: input size of the net)')),
    argument('--batch-size', type=natural, nargs='+', default=[1, 4, 32], help='images per batch (default: 1 4 32)'),
    argument('--dtype', nargs='+', default=['float32'], choices=['float32', 'bfloat16'], help=(
        'types of parameters and images (default: float32)')),
    argument('--train', action='store_true', help='measure forward, loss and backward instead of inference'), DEVICE,
    argument('--seconds', type=float, default=3., help='time per net and size (default: 3 seconds)'))
def bench(args: Namespace) -> None:
    """Measure the speed of a net, and compare it with the released algorithm and with its Linear layers.

    Example: timm-selfconv bench sa_quadratic_tiny_cifar --img-size 32 64 --batch-size 1
    """
    device = find_device(args.device)
    model = load_model(args).to(device)
    cuda = device.type == 'cuda'
    hardware = torch.cuda.get_device_name(device) if cuda else f'{device}, {torch.get_num_threads()} thread(s)'
    sizes = args.img_size or [model.pretrained_cfg['input_size'][-1]]
    speeds: List[Dict[str, Any]] = []
    for dtype, size, batch in product(args.dtype, sizes, args.batch_size, unit='size', leave=False, disable=None):
        try:
            speeds += benchmark.bench(model, size, batch, dtype, args.train, args.seconds)
        except (AssertionError, RuntimeError) as e:
            raise ValueError(f'img_size={size}: {type(model).__name__} does not accept it ({e})') from e
    table = tabulate(
        [speed.values() for speed in speeds], ('', 'pixels', 'batch', 'dtype', 'images a second', 'ratio',
                                               'of the GEMM limit'), floatfmt='.2f', missingval='-')
    print(f"{args.model}, {'forward and backward' if args.train else 'eval'}, {hardware}: medians of batches in turn\n"
          f'{table}')


def fact(text: str) -> Tuple[str, str]:
    key, equals, value = text.partition('=')
    if not equals:
        raise ArgumentTypeError(f'{text!r}: needs KEY=VALUE')
    return key, value


@command(
    GROUP, argument('model', type=model_name, metavar='MODEL', help='NAME or NAME.TAG of a net of the zoo'),
    argument('--checkpoint', required=True, type=existing_file, metavar='FILE', help='e.g. run/last.pth.tar'),
    argument('--data', required=True, help='CIFAR-10, as for eval'), output('DIR', 'folder for the new files', Path),
    argument('--fact', action='append', type=fact, default=[], metavar='KEY=VALUE', help=(
        'another row of the card; can be repeated')))
def export(args: Namespace) -> None:
    """Export a checkpoint as a weight file with a model card and its measured accuracy.

    Example: timm-selfconv export sa_quadratic_tiny_cifar --checkpoint run/last.pth.tar --data cifar10 --output weights

    The card repeats the facts about the training from README.md in the folder of the checkpoint.
    """
    path = args.output / weights_path(args.model).name
    check_new(path)  # a killed export leaves only a card
    history = find_history(args.checkpoint.parent)  # of the run
    if history is not None:
        read_history(history)
    trained = card_facts(f'local-dir:{args.checkpoint.parent}')
    if 'teacher' not in trained:  # no card, or a card of another project
        trained = {}
    name, card = args.model.partition('.')[0], path.with_suffix('.md')  # a new tag is not registered
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, path.name)
        saving.save_weights(create_model(name, args.checkpoint), saved)
        model = create_model(name, saved)
        result, counts, published = evaluate(model, args.data), count(model), tables.ACCURACIES
        facts = {
            **{key: fact for key, fact in trained.items() if key not in saving.NET_ROWS},
            'input': ' x '.join(map(str, model.pretrained_cfg['input_size'])),
            'classes': f"{model.num_classes}: {', '.join(label_names(model))}",
            'parameters': f'{counts.parameters:,}', 'multiply-adds': f'{counts.flops // 2:,}',
            'published accuracy': ', '.join(
                f'{published[source, path.stem]:.3f} ({authors})' for source, authors in (
                    (tables.PAPER, 'Cordonnier et al., 2020'), (tables.REPORT, 'Varma T and Prabhu, 2021'))
                if (source, path.stem) in published),
            **dict(args.fact), 'SHA-256': sha256(saved)}
        summary = (timm.model_entrypoint(name).__doc__ or '').partition('\n')[0]
        measured_on = None if is_cifar10_test(model, args.data) else f'the test split of {data_name(args.data)}'
        ships = path.resolve().parts[-3:-1] == ('timm_selfconv', 'weights')  # pretrained=True loads it from there
        text = saving.model_card(
            args.model, summary, result.top1, result.images, facts, measured_on, None if ships else path.name)
        replace_file(card, lambda file: file.write_text(text))  # before the weights
        if history is not None:
            replace_file(path.with_suffix(f'.{HISTORY}'), lambda file: shutil.copyfile(history, file))
        saving.record_checksum(path, facts['SHA-256'])
        write_new(path, saved.read_bytes())
    print(f'{path}: top-1 {result.top1:.4f} on {result.images} images, card in {card}')


@command(
    GROUP, argument('models', nargs='*', metavar='MODEL', help=(
        'local-dir:FOLDER, or nets of the zoo with weights (default: all nets with weights)')),
    argument('--owner', required=True, metavar='ORG', help=(
        'owner of the repositories, which have the names of the nets or folders; log in first: hf auth login')),
    argument('--private', action='store_true', help='create private repositories'))
def publish(args: Namespace) -> None:
    """Upload nets to the Hugging Face Hub: weights, configuration and card, in one commit per net.

    Example: timm-selfconv publish local-dir:mynet --owner me
    """
    zoo = checksums()
    names = args.models or list(zoo)
    unknown = sorted(name for name in names if name not in zoo and not name.startswith('local-dir:'))
    if unknown:
        raise ValueError(f'models={unknown}: needs local-dir:FOLDER, or weights of the zoo: {", ".join(zoo)}')
    for name in tqdm(names, unit='net', leave=False, disable=None):
        if name in zoo:
            model, repo_id = create_model(tagged_name(name)), f'{args.owner}/{name}'
            card, weights = card_path(name).read_text(), Path(model.pretrained_cfg['file'])  # with its checksum
        else:
            model, title, weights = create_model(name), Path(name.removeprefix('local-dir:')).resolve().name, None
            repo_id = f'{args.owner}/{title}'
            summary = f"`{model.pretrained_cfg['architecture']}` with {model.num_classes} classes."
            card = card_path(name).read_text() if card_path(name).is_file() else \
                saving.card_text(title, summary, {}, "'local-dir:', pretrained=True")
            card = re.sub("'local-dir:[^']*'", f"'hf-hub:{repo_id}'", card)
        tqdm.write(publishing.publish(model, repo_id, card, args.private, weights))


@command(GROUP, argument('script', type=existing_file, metavar='SCRIPT', help="Python file, e.g. timm's validate.py"),
         argument('args', nargs=REMAINDER, metavar='ARGS', help='arguments of the script'))
def run(args: Namespace) -> None:
    """Run a script of timm (validate.py, benchmark.py, ...) with the nets of the zoo.

    Example: timm-selfconv run validate.py --model sa_quadratic_tiny_cifar --pretrained --data-dir pictures
    """
    sys.argv = [str(args.script), *args.args]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        runpy.run_path(str(args.script), run_name='__main__')
    except Exception:  # the script's traceback, not a one-line error of ours
        traceback.print_exc()
        sys.exit(1)
