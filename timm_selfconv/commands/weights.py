"""New weight files from old: export, include, prune."""
import argparse
import dataclasses
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn as nn
from tabulate import tabulate
from timm.data import resolve_data_config
from timm.models import split_model_name_tag

from timm_selfconv import theory
from timm_selfconv.data import data_name, preprocess, sample_pictures
from timm_selfconv.files import check_new, replace_file, sha256, write_new
from timm_selfconv.measure import counting, evaluation
from timm_selfconv.training.recipes import find_recipe
from timm_selfconv.weights import saving, weights_path
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from .nets import create_model


def run_export(args: argparse.Namespace) -> None:
    for fact in args.fact:
        if '=' not in fact:
            raise ValueError(f'fact={fact!r}: needs KEY=VALUE')
    name, _ = split_model_name_tag(args.model)  # a new tag is not registered before its file is there
    path = Path(args.output, weights_path(args.model).name)
    card = path.with_suffix('.md')
    check_new(path)  # a card alone is what an export left that was killed
    history = find_history(Path(args.checkpoint).parent)  # of the run; shards have it beside their folder
    if history is not None:
        read_history(history)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, path.name)
        saving.save_weights(create_model(name, args.checkpoint), saved)
        model = create_model(name, str(saved))
        result = evaluation.evaluate(model, args.data)
        facts = dict(dict(fact.split('=', 1) for fact in args.fact), **{'SHA-256': sha256(saved)})
        known = evaluation.is_cifar10_test(model, args.data)
        measured_on = None if known else f'the test split of {data_name(args.data)}'
        ships = path.resolve().parts[-3:-1] == ('timm_selfconv', 'weights')  # where pretrained=True finds it
        text = saving.model_card(
            args.model, result.top1, result.images, facts, measured_on, file=None if ships else path.name)
        replace_file(card, lambda file: file.write_text(text))  # first: no weights without a card
        if history is not None:
            replace_file(path.with_suffix(f'.{HISTORY}'), lambda file: shutil.copyfile(history, file))
        saving.record_checksum(path, facts['SHA-256'])
        write_new(path, saved.read_bytes())
    print(f'{path}: top-1 {result.top1:.4f} on {result.images} images, card in {card}')


def run_include(args: argparse.Namespace) -> None:
    folder = Path(args.output)
    check_new(folder)
    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    torch.manual_seed(args.seed)  # new heads are initialised
    saving.save_folder(theory.include(model, args.target), folder)
    model_args = json.loads((folder / 'config.json').read_text())['model_args']
    train = shlex.join([
        'python', '-m', 'timm_selfconv.train', 'finetune', '--output', f'{folder}-trained',
        f'model={args.target}', f'initial_checkpoint={folder / "model.safetensors"}',
        f'model_kwargs={json.dumps(model_args)}'])
    print(f'Use it:      timm.create_model({f"local-dir:{folder}"!r}, pretrained=True)')
    print(f'Train it on: {train}')


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


def why_degenerate(model: nn.Module, heads: Dict[int, List[int]], min_eigenvalue: float) -> List[Dict[str, Any]]:
    """Why heads are degenerate, one row per head."""
    rows = []
    for layer, eigenvalues in theory.precision_eigenvalues(model).items():
        conditions = theory.condition_numbers(eigenvalues).tolist()
        for head in heads.get(layer, []):
            largest = float(eigenvalues[head, 1])
            rows.append({
                'layer': layer, 'head dropped': head, 'largest eigenvalue': largest,
                'condition number': conditions[head],
                'it attends to': 'all pixels alike' if largest < min_eigenvalue else 'a thin stripe'})
    return rows


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


def prune(model: nn.Module, args: argparse.Namespace) -> Tuple[nn.Module, List[Dict[str, Any]]]:
    """The smaller net that the arguments ask for, and which heads it lost, a row each or a layer each."""
    if args.keep:
        if args.data is None:
            raise ValueError(f'keep={args.keep}: needs --data, images on which heads take over what others did')
        pictures = sample_pictures(args.data, args.split, args.data_dir, args.input_key, args.count)
        merged, report = theory.merge_heads(model, args.keep, preprocess(model, pictures))
        return merged, [
            {'layer': merge.layer, 'heads dropped': list(merge.dropped), 'error of its sum of heads': merge.error}
            for merge in report]
    if args.data is not None:
        raise ValueError(f'data={args.data!r}: needs --keep, the numbers of heads; nothing else looks at images')
    if args.heads:
        heads = parse_heads(args.heads)
        return theory.prune_heads(model, heads), [
            {'layer': layer, 'heads dropped': dropped} for layer, dropped in heads.items()]
    heads = theory.degenerate_heads(model, args.min_eigenvalue, args.max_condition)
    if not heads:
        raise ValueError(f'model={args.model!r}: has no degenerate heads, nothing to prune')
    return theory.prune_heads(model, heads), why_degenerate(model, heads, args.min_eigenvalue)


def run_prune(args: argparse.Namespace) -> None:
    folder = Path(args.output)
    check_new(folder)
    model = create_model(args.model, args.checkpoint, args.untrained, args.seed)
    pruned, rows = prune(model, args)
    input_size = resolve_data_config({}, model=model)['input_size']
    before, after = counting.count(model, input_size), counting.count(pruned, input_size)
    saving.save_folder(pruned, folder)
    use, train = f'local-dir:{folder}', train_on_command(folder)
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
