"""From a folder of pictures to a net: finetune."""
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from timm_selfconv.training.recipes import read_recipe
from ._shared import add_output, model_name

RECIPE = 'pictures'


def add_finetune(parser: ArgumentParser) -> None:
    parser.add_argument(
        'model', type=model_name, metavar='MODEL', help='begin in its weights: a name, or local-dir:FOLDER')
    parser.add_argument('folder', metavar='FOLDER', help=(
        'FOLDER/train/CLASS and FOLDER/val/CLASS, or FOLDER/CLASS, of which a fifth is held out'))
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='a key of the recipe, e.g. epochs=40')
    add_output(parser, 'DIR', 'folder of the net, and of its run', Path)
    parser.add_argument('--checkpoint', metavar='FILE', help="begin in these weights of the net, not in its own")
    parser.add_argument('--img-size', type=int, metavar='N', help="side of the images in pixels (default: the net's)")
    parser.add_argument('--seed', type=int, metavar='N', help='of the training, and of what is held out (default: 42)')
    parser.add_argument('--device', help='default: cuda where there is one, else cpu')


def run_finetune(args: Namespace) -> None:
    """Train a net to tell your own pictures apart, from a folder with a folder a class."""
    given = dict(seed=args.seed, img_size=args.img_size, initial_checkpoint=args.checkpoint)
    recipe = read_recipe(RECIPE, [
        f'pretrained={args.checkpoint is None}', *args.overrides,
        *(f'{key}={value}' for key, value in given.items() if value is not None)])
    from timm_selfconv.data import data_name
    from timm_selfconv.measure.evaluation import find_device
    from timm_selfconv.training.picture_folder import open_picture_folder
    from timm_selfconv.training.runs import run_facts, save_net, train

    *datasets, held_out = open_picture_folder(args.folder, recipe.seed)
    classes, (seen, held) = datasets[0].reader.class_to_idx, map(len, datasets)
    recipe.model, recipe.num_classes, recipe.batch_size = args.model, len(classes), min(recipe.batch_size, seen)
    told = f'{seen} pictures to train on, {held} to validate on ({held_out})'
    print(f'{len(classes)} classes, {", ".join(classes)}: {told}', flush=True)
    try:
        training = train(recipe, datasets, find_device(args.device), args.output)
    except FloatingPointError as e:
        raise ValueError(f'{e}; try a smaller lr, in another folder') from e
    facts = run_facts(training, RECIPE, args.overrides, args.folder)
    name = save_net(training, args.output, {
        **facts, 'script': 'timm-selfconv finetune', 'data': f'{data_name(args.folder)}: {told}'})
    pictures = [file for file, _ in datasets[1].reader.samples[:2]]
    print(f"\n{training.history[-1]['eval_top1'] / 100:.4f} of the pictures to validate on are right. Use the net:\n"
          f'timm.create_model({name!r}, pretrained=True)')
    for command in (['classify', name, *pictures], ['explore', name, *pictures, '--output', 'explorer.html']):
        print(shlex.join(['timm-selfconv', *command]))
