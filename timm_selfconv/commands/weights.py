"""New weight files from old: export, include, prune."""
import dataclasses
import json
import re
import shlex
import shutil
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any, Dict, List, Tuple

from tabulate import tabulate

from timm_selfconv.files import check_new, replace_file, sha256, write_new
from timm_selfconv.training.recipes import find_recipe
from ._shared import add_data, add_model, add_output, checkpoint, create_model, model_name, natural


def fact(text: str) -> Tuple[str, str]:
    """A row of the card."""
    key, equals, value = text.partition('=')
    if not equals:
        raise ArgumentTypeError(f'{text!r}: needs KEY=VALUE')
    return key, value


def add_export(parser: ArgumentParser) -> None:
    parser.add_argument('model', type=model_name, metavar='MODEL', help='NAME or NAME.TAG, of the zoo')
    parser.add_argument('--checkpoint', required=True, type=checkpoint, help="checkpoint, e.g. timm's last.pth.tar")
    parser.add_argument('--data', required=True, help='CIFAR-10, as for eval')
    add_output(parser, 'DIR', 'folder of the new files', Path)
    parser.add_argument('--fact', action='append', type=fact, default=[], metavar='KEY=VALUE', help='a row of the card')


def run_export(args: Namespace) -> None:
    """Turn a training checkpoint into a weight file with a measured model card."""
    from timm_selfconv.weights import weights_path
    from timm_selfconv.weights.history import HISTORY, find_history, read_history

    path = args.output / weights_path(args.model).name
    check_new(path)  # a card without weights is what a killed export left
    history = find_history(Path(args.checkpoint).parent)  # of the run
    if history is not None:
        read_history(history)
    from timm_selfconv.weights import saving
    from timm_selfconv.data import data_name
    from timm_selfconv.measure.counting import count
    from timm_selfconv.measure.evaluation import evaluate, is_cifar10_test

    name, card = args.model.partition('.')[0], path.with_suffix('.md')  # a new tag is not registered yet
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, path.name)
        saving.save_weights(create_model(name, args.checkpoint), saved)
        model = create_model(name, str(saved))
        result = evaluate(model, args.data)
        counts = count(model)
        facts = {'parameters': f'{counts.parameters:,}', 'multiply-adds': f'{counts.flops // 2:,}', **dict(args.fact),
                 'SHA-256': sha256(saved)}
        measured_on = None if is_cifar10_test(model, args.data) else f'the test split of {data_name(args.data)}'
        ships = path.resolve().parts[-3:-1] == ('timm_selfconv', 'weights')  # where pretrained=True finds it
        text = saving.model_card(
            args.model, result.top1, result.images, facts, measured_on, file=None if ships else path.name)
        replace_file(card, lambda file: file.write_text(text))  # first: no weights without a card
        if history is not None:
            replace_file(path.with_suffix(f'.{HISTORY}'), lambda file: shutil.copyfile(history, file))
        saving.record_checksum(path, facts['SHA-256'])
        write_new(path, saved.read_bytes())
    print(f'{path}: top-1 {result.top1:.4f} on {result.images} images, card in {card}')


def add_include(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        'target', type=model_name, metavar='TARGET', help='name of the richer net, e.g. sa_learned_content_cifar')
    add_output(parser, 'DIR', 'new folder for the richer net')


def run_include(args: Namespace) -> None:
    """Turn a net into a richer one that computes the same, to train it on."""
    import torch
    from timm_selfconv import theory
    from timm_selfconv.weights import saving

    folder = args.output
    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    torch.manual_seed(args.seed)  # new heads are initialised
    saving.save_folder(theory.include(model, args.target), folder)
    model_args = json.loads((folder / 'config.json').read_text())['model_args']
    train = shlex.join([
        'timm-selfconv', 'train', 'finetune', '--output', f'{folder}-trained', f'model={args.target}',
        f'initial_checkpoint={folder / "model.safetensors"}', f'model_kwargs={json.dumps(model_args)}'])
    print(f'Use it:      timm.create_model({f"local-dir:{folder}"!r}, pretrained=True)')
    print(f'Train it on: {train}')


def layer_heads(text: str) -> Tuple[int, List[int]]:
    """A layer and heads of it."""
    match = re.fullmatch(r'(\d+):(\d+(?:,\d+)*)', text)
    if match is None:
        raise ArgumentTypeError(f'{text!r}: needs LAYER:HEAD,HEAD, counted from 0')
    return int(match[1]), [int(head) for head in match[2].split(',')]


def add_prune(parser: ArgumentParser) -> None:
    add_model(parser)
    add_data(parser, 'train')
    add_output(parser, 'DIR', 'new folder for the smaller net')
    parser.add_argument('--min-eigenvalue', type=float, default=1e-5, help=(
        "drop heads whose precision's largest eigenvalue is below this (default: 1e-5)"))
    parser.add_argument('--max-condition', type=float, default=1e5, help=(
        "drop heads whose precision's condition number is above this (default: 1e5; the released code: 1e3)"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--heads', nargs='+', type=layer_heads, metavar='LAYER:HEAD,HEAD', help=(
        'drop these instead, counted from 0'))
    which.add_argument('--keep', type=int, nargs='+', metavar='HEADS', help=(
        'keep so many of each layer instead, which take over what the others did on images of --data'))
    parser.add_argument('--data', help='folder or name as for eval')
    parser.add_argument('--count', type=natural, default=100, help='how many images of it (default: 100)')
    parser.add_argument('--json', action='store_true', help='print JSON')


def train_on_command(folder: Path) -> str:
    """The command that trains a pruned net on, from the folder that it was saved in."""
    config = json.loads((folder / 'config.json').read_text())
    model_kwargs = {
        'attn_drop_rate': 0.1,  # the recipe's: on the command line --model-kwargs replaces the recipe's altogether
        # train.py has arguments of its own for these
        **{k: v for k, v in config['model_args'].items() if k not in ('in_chans', 'num_classes', 'global_pool')}}
    return shlex.join([
        'python', 'train.py', '-c', str(find_recipe('pruned')), '--model', config['architecture'],
        '--num-classes', str(config['num_classes']), '--initial-checkpoint', str(folder / 'model.safetensors'),
        '--model-kwargs', *(f'{k}={v!r}'.replace(' ', '') for k, v in model_kwargs.items())])


def prune(model: Any, args: Namespace) -> Tuple[Any, List[Dict[str, Any]]]:
    """The smaller net that the arguments ask for, and which heads it lost, a row each or a layer each."""
    from timm_selfconv import theory
    from timm_selfconv.data import preprocess, sample_pictures

    if args.keep:
        pictures = sample_pictures(args.data, args.split, args.data_dir, args.input_key, args.count)
        merged, report = theory.merge_heads(model, args.keep, preprocess(model, pictures))
        return merged, [
            {'layer': merge.layer, 'heads dropped': list(merge.dropped), 'error of its sum of heads': merge.error}
            for merge in report]
    if args.heads:
        return theory.prune_heads(model, dict(args.heads)), [
            {'layer': layer, 'heads dropped': dropped} for layer, dropped in args.heads]
    heads = theory.degenerate_heads(model, args.min_eigenvalue, args.max_condition)
    if not heads:
        raise ValueError(f'model={args.model!r}: has no degenerate heads, nothing to prune')
    eigenvalues = theory.precision_eigenvalues(model)
    rows = [{
        'layer': layer, 'head dropped': head, 'largest eigenvalue': float(eigenvalues[layer][head, 1]),
        'condition number': float(theory.condition_numbers(eigenvalues[layer])[head]),
        'it attends to': 'all pixels alike' if eigenvalues[layer][head, 1] < args.min_eigenvalue else 'a thin stripe',
    } for layer, dropped in heads.items() for head in dropped]
    return theory.prune_heads(model, heads), rows


def run_prune(args: Namespace) -> None:
    """Drop heads that see all pixels equally or a thin stripe, heads you name, or those whose work others can do."""
    if args.keep and args.data is None:
        raise ValueError(f'keep={args.keep}: needs --data, images on which heads take over what others did')
    if args.data is not None and not args.keep:
        raise ValueError(f'data={args.data!r}: needs --keep, the numbers of heads; nothing else looks at images')
    if args.heads and len(dict(args.heads)) < len(args.heads):
        raise ValueError(f'heads={args.heads}: needs each layer once')
    from timm.models._input import get_model_input_config
    from timm_selfconv.weights import saving
    from timm_selfconv.measure.counting import count

    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    pruned, rows = prune(model, args)
    input_size = get_model_input_config(model)['input_size']
    before, after = count(model, input_size), count(pruned, input_size)
    saving.save_folder(pruned, args.output)
    use, train = f'local-dir:{args.output}', train_on_command(args.output)
    if args.json:
        print(json.dumps(dict(
            model=use, dropped=rows, before=dataclasses.asdict(before), after=dataclasses.asdict(after), train=train),
            indent=2))
        return
    print(tabulate(rows, headers='keys', floatfmt='.2g'))
    print('\n' + tabulate(
        [('parameters', f'{before.parameters:,}', f'{after.parameters:,}'),
         ("FLOPs, the paper's way", f'{before.linear_conv_flops:,}', f'{after.linear_conv_flops:,}'),
         ('FLOPs with attention', f'{before.flops:,}', f'{after.flops:,}')],
        headers=('', 'before', 'after'), disable_numparse=True, colalign=('left', 'right', 'right')))
    print(f'\nUse it:      timm.create_model({use!r}, pretrained=True)')
    print(f'Train it on: {train}')
