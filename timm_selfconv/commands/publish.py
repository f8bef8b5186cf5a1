"""The command that puts nets on the Hub."""
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tqdm import tqdm

from ._shared import create_model


def add_publish(parser: ArgumentParser) -> None:
    parser.add_argument('models', nargs='*', metavar='MODEL', help=(
        'local-dir:FOLDER, or nets of the zoo that have weights (default: all of these)'))
    parser.add_argument('--owner', required=True, metavar='ORG', help=(
        'its repositories take the names of nets and folders; log in with: hf auth login'))
    parser.add_argument('--private', action='store_true', help='make new repositories that only their owner can see')


def run_publish(args: Namespace) -> None:
    """Upload nets to the Hub: weights, configuration and card, one commit of what has changed each."""
    from timm_selfconv.weights import card_path, checksums, tagged_name

    zoo = checksums()
    names = args.models or list(zoo)
    unknown = sorted(name for name in names if name not in zoo and not name.startswith('local-dir:'))
    if unknown:
        raise ValueError(f'models={unknown}: needs local-dir:FOLDER, or weights of the zoo: {", ".join(zoo)}')
    from timm_selfconv.weights.publishing import publish
    from timm_selfconv.weights.saving import card_text

    for name in tqdm(names, unit='net', leave=False, disable=None):
        if name in zoo:
            model, repo_id = create_model(tagged_name(name)), f'{args.owner}/{name}'
            card, weights = card_path(name).read_text(), Path(model.pretrained_cfg['file'])  # with its checksum
        else:
            model, folder, weights = create_model(name), Path(name.removeprefix('local-dir:')), None
            title = folder.resolve().name
            repo_id = f'{args.owner}/{title}'
            summary = f"`{model.pretrained_cfg['architecture']}` with {model.num_classes} classes."
            card = card_path(name).read_text() if card_path(name).is_file() else \
                card_text(title, summary, {}, "'local-dir:', pretrained=True")
            card = re.sub("'local-dir:[^']*'", f"'hf-hub:{repo_id}'", card)
        tqdm.write(publish(model, repo_id, card, args.private, weights))
