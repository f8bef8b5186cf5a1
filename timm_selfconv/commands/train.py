"""Commands that train, evaluate and transform nets: finetune, train, eval, include, prune."""
import json
import re
import shlex
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
from tabulate import tabulate
from timm.models._input import get_model_input_config

from timm_selfconv import theory
from timm_selfconv.data import data_name, open_dataset
from timm_selfconv.measure.counting import count
from timm_selfconv.measure.evaluation import evaluate, find_device
from timm_selfconv.training import runs
from timm_selfconv.training.picture_folder import open_picture_folder
from timm_selfconv.training.recipes import read_recipe
from timm_selfconv.weights.saving import save_folder
from ._shared import (
    DEVICE, INPUT_KEY, JSON, MODEL, NET, SPLIT, argument, command, load_model, model_name, natural, output, show,
)

TRAIN, TRANSFORM = 'train', 'transform weights'
PICTURES_RECIPE = 'pictures'
OVERRIDES = argument('overrides', nargs='*', metavar='KEY=VALUE', help='set a key of the recipe, e.g. epochs=40')


@command(
    TRAIN, MODEL, argument('folder', metavar='FOLDER', help=(
        'pictures in FOLDER/train/CLASS and FOLDER/val/CLASS, or in FOLDER/CLASS (a fifth is held out)')), OVERRIDES,
    output('DIR', 'folder for the net, its checkpoints and its history', Path), DEVICE)
def finetune(args: Namespace) -> None:
    """Fine-tune a net on your own pictures, in one folder per class.

    Example: timm-selfconv finetune sa_quadratic_tiny_cifar pictures --output mynet
    """
    recipe = read_recipe(PICTURES_RECIPE, args.overrides)
    taken = [text for text in args.overrides if text.startswith(('model=', 'num_classes='))]
    if taken:
        raise ValueError(f'{taken}: finetune takes the net from MODEL and the classes from FOLDER')
    *datasets, held_out = open_picture_folder(args.folder, recipe.seed)
    classes, (seen, held) = datasets[0].reader.class_to_idx, map(len, datasets)
    recipe.model, recipe.num_classes, recipe.batch_size = args.model, len(classes), min(recipe.batch_size, seen)
    told = f'{seen} pictures to train on, {held} to validate on ({held_out})'
    print(f'{len(classes)} classes, {", ".join(classes)}: {told}', flush=True)
    training = runs.train(recipe, datasets, find_device(args.device), args.output)
    facts = runs.run_facts(training, PICTURES_RECIPE, args.overrides, args.folder)
    name = runs.save_net(training, args.output, {
        **facts, 'script': 'timm-selfconv finetune', 'data': f'{data_name(args.folder)}: {told}'})
    pictures = [file for file, _ in datasets[1].reader.samples[:2]]
    print(f"\nAccuracy on the pictures to validate on: {training.history[-1]['eval_top1'] / 100:.4f}. Use the net:\n"
          f'timm.create_model({name!r}, pretrained=True)')
    for line in (['classify', name, *pictures], ['explore', name, *pictures, '--output', 'explorer.html']):
        print(shlex.join(['timm-selfconv', *line]))


@command(
    TRAIN, argument('recipe', metavar='RECIPE', help='YAML file, or a name from timm-selfconv list --recipes'),
    OVERRIDES, output('DIR', 'folder for checkpoints and history', Path),
    argument('--data', help='folder, or name of a timm dataset (default: dataset of the recipe)'), DEVICE,
    argument('--batches', type=natural, metavar='N', help='batches per epoch, for a short test (default: all)'))
def train(args: Namespace) -> None:
    """Train a net on one device, with a recipe that also works in timm's train.py.

    Examples: timm-selfconv train half_hour --output run
              timm-selfconv train paper model=sa_learned_cifar batch_size=512 lr=0.512 --output run

    recipes/README.md explains the keys. VALUE is YAML; null removes a key. After each epoch the command writes
    last.pth.tar in timm's layout, summary.csv with timm's columns, and history.json. You can stop it at any time. The
    same command resumes after the last complete epoch, and gives the same weights. The result is the last weights, or
    their moving average (model_ema). Nothing is selected by test accuracy. To tune a recipe, hold out training images:
    train_split='train[:45000]' val_split='train[45000:]'.
    """
    recipe = read_recipe(args.recipe, args.overrides)
    data, device = args.data or recipe.dataset, find_device(args.device)
    datasets = [open_dataset(data, split, recipe.input_key, recipe.target_key)
                for split in (recipe.train_split, recipe.val_split)]
    training = runs.train(recipe, datasets, device, args.output, args.batches)
    name = runs.save_net(training, args.output, runs.run_facts(training, args.recipe, args.overrides, data))
    print(f'timm.create_model({name!r}, pretrained=True)')


@command(
    TRAIN, *NET,
    argument('--data', required=True, help='folder, or dataset of the Hub, e.g. hfds/uoft-cs/cifar10'), SPLIT,
    INPUT_KEY, argument('--target-key', default='label', metavar='KEY', help='column of the labels (default: label)'),
    argument('--batch-size', type=natural, default=64, metavar='N', help='images per batch (default: 64)'), DEVICE,
    JSON)
def eval_(args: Namespace) -> None:
    """Measure accuracy on a dataset.

    Example: timm-selfconv eval sa_quadratic_tiny_cifar --data hfds/uoft-cs/cifar10
    """
    result = evaluate(
        load_model(args), args.data, args.split, args.batch_size, args.input_key, args.target_key, args.device)
    classes = tabulate(result.per_class.items(), headers=('class', 'accuracy'), floatfmt='.3f', disable_numparse=[0])
    show(args, dict(model=args.model, **asdict(result)), (
        f'{args.model}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f} on {result.images} images, '
        f'{result.images_per_second:.0f} images a second\n{classes}'))


def save_for(recipe: str, model: Any, folder: Path) -> str:
    """Write a net into a new folder, and return the code that loads it and the command that continues to train it."""
    save_folder(model, folder)
    config = json.loads((folder / 'config.json').read_text())
    key = f"model={config['architecture']}"
    kwargs = {**read_recipe(recipe, [key]).model_kwargs, **config['model_args'], 'num_classes': config['num_classes']}
    train = shlex.join([
        'timm-selfconv', 'train', recipe, '--output', f'{folder}-trained', key,
        f"initial_checkpoint={folder / 'model.safetensors'}", f'model_kwargs={json.dumps(kwargs)}'])
    return f"Use it:   timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)\nTrain it: {train}"


@command(
    TRANSFORM, *NET, argument(
        'target', type=model_name, metavar='TARGET', help='name of the richer net, e.g. sa_learned_content_cifar'),
    output('DIR', 'new folder for the richer net'))
def include(args: Namespace) -> None:
    """Copy a net into a richer net with the same logits, to continue training.

    Example: timm-selfconv include sa_quadratic_tiny_cifar sa_learned_content_cifar --output rich
    """
    model = load_model(args)
    torch.manual_seed(42)  # new heads are initialised
    print(save_for('finetune', theory.include(model, args.target), args.output))


def layer_heads(text: str) -> Tuple[int, List[int]]:
    match = re.fullmatch(r'(\d+):(\d+(?:,\d+)*)', text)
    if match is None:
        raise ArgumentTypeError(f'{text!r}: needs LAYER:HEAD,HEAD, counted from 0')
    return int(match[1]), [int(head) for head in match[2].split(',')]


@command(
    TRANSFORM, *NET, output('DIR', 'new folder for the smaller net'),
    argument('--heads', nargs='+', type=layer_heads, default=[], metavar='LAYER:HEAD,HEAD', help=(
        'drop these heads instead; layers and heads count from 0')))
def prune(args: Namespace) -> None:
    """Drop degenerate heads, or heads that you name.

    Example: timm-selfconv prune sa_quadratic_tiny_cifar --heads 0:1,8 5:0 --output pruned
    """
    heads = dict(args.heads)
    if len(heads) < len(args.heads):
        raise ValueError(f'heads={args.heads}: needs each layer once')
    model = load_model(args)
    rows: List[Dict[str, Any]] = [{'layer': layer, 'heads dropped': dropped} for layer, dropped in heads.items()]
    if not heads:
        heads = theory.degenerate_heads(model)
        if not heads:
            raise ValueError(f'model={args.model!r}: has no degenerate heads, so there is nothing to prune')
        eigenvalues = theory.precision_eigenvalues(model)
        rows = [{
            'layer': layer, 'head dropped': head, 'largest eigenvalue': float(eigenvalues[layer][head, 1]),
            'condition number': float(theory.condition_numbers(eigenvalues[layer])[head]),
        } for layer, dropped in heads.items() for head in dropped]
    pruned = theory.prune_heads(model, heads)
    input_size = get_model_input_config(model)['input_size']
    before, after = count(model, input_size), count(pruned, input_size)
    told = save_for('pruned', pruned, args.output)
    counts = tabulate(
        [('parameters', f'{before.parameters:,}', f'{after.parameters:,}'),
         ("FLOPs, as in the paper", f'{before.linear_conv_flops:,}', f'{after.linear_conv_flops:,}'),
         ('FLOPs with attention', f'{before.flops:,}', f'{after.flops:,}')],
        headers=('', 'before', 'after'), disable_numparse=True, colalign=('left', 'right', 'right'))
    print(f"{tabulate(rows, headers='keys', floatfmt='.2g')}\n\n{counts}\n\n{told}")
