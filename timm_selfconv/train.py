"""Train a net of the zoo as fast as one device allows, by the same recipe that timm's train.py takes.

    timm-selfconv train recipes/paper.yaml model=sa_learned_cifar --output runs/learned
    timm-selfconv train recipes/paper.yaml model=sa_learned_cifar --output runs/fast batch_size=512 lr=0.512

``python -m timm_selfconv.train`` is the same. Unlike train.py it keeps all images on the device as uint8 and crops and
flips them there, and a GPU runs the net compiled, once for each image size. KEY=VALUE replaces a key of the recipe
(YAML; null removes it); an unknown key stops it. Keys for this script only, which recipes/README.md explains:
`crop_padding`, `crop_padding_mode`, `img_sizes`, `hardest_half`, `stem_whitening`, `position_lr_scale`,
`query_key_lr_scale`, `kd_maps` and `kd_maps_weight`.

Images are resized and cropped as the net's configuration asks for, or to `img_size` pixels, and their classes are the
net's by name. `num_classes` gives it a new classifier, for those of the data; `pretrained` begins in its weights.

OUTPUT gets last.pth.tar after each epoch (timm's layout), as many older ones as `checkpoint_hist` asks for,
summary.csv (timm's columns) and history.json, which also says where the heads looked after each epoch. Stop the script
at any moment and start it again with the same arguments: it goes on after the last whole epoch and ends with the
weights that it would have had. It tells how to export them; a net with classes, size or arguments of its own lies in
OUTPUT in the end, as timm's `local-dir:` nets do. Nothing is chosen by test accuracy: the last weights count, or their
average (`model_ema`) if the recipe keeps one. To tune a recipe, hold images out of the training split:
train_split='train[:45000]' val_split='train[45000:]'.
"""
import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from timm_selfconv.commands._shared import natural


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument('recipe', metavar='RECIPE', help="YAML file, or the name of one of the package's, e.g. paper")
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='replaces a key of the recipe')
    parser.add_argument('--output', required=True, type=Path, metavar='DIR', help='checkpoint and summary')
    parser.add_argument('--data', help="folder or timm dataset name (default: the recipe's)")
    parser.add_argument('--device', help='default: cuda where there is one, else cpu')
    parser.add_argument('--batches', type=natural, metavar='N', help='batches an epoch, for a rehearsal (default: all)')


def run_train(options: argparse.Namespace) -> None:
    """Train a net on one device, by the same recipes as timm's train.py."""
    from timm_selfconv.training.recipes import read_recipe

    args = read_recipe(options.recipe, options.overrides)
    from timm_selfconv.data import open_dataset
    from timm_selfconv.measure.evaluation import find_device
    from timm_selfconv.training.runs import export_command, has_folder, run_facts, save_net, train

    device = find_device(options.device)
    data = options.data or args.dataset
    datasets = [open_dataset(data, split, None, args.input_key, args.target_key)
                for split in (args.train_split, args.val_split)]
    try:
        training = train(args, datasets, device, options.output, options.batches)
    except FloatingPointError as e:
        print(f'timm-selfconv: {e}', file=sys.stderr)
        sys.exit(1)
    if has_folder(args):
        facts = run_facts(training, options.recipe, options.overrides, data)
        print(f'timm.create_model({save_net(training, options.output, facts)!r}, pretrained=True)')
    else:
        print(export_command(training, options, data))


def main(argv: Optional[Sequence[str]] = None) -> None:
    from timm_selfconv.cli import main as cli

    cli(['train', *(sys.argv[1:] if argv is None else argv)])


if __name__ == '__main__':
    main()
