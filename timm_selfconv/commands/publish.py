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
    import timm
    from timm_selfconv.weights.loading import weights_file
    from timm_selfconv.weights.publishing import publish
    from timm_selfconv.weights.saving import card_text

    for name in tqdm(names, unit='net', leave=False, disable=None):
        own = name.startswith('local-dir:')
        title = Path(name.removeprefix('local-dir:')).resolve().name if own else name
        repo_id, path, weights = f'{args.owner}/{title}', card_path(name), None
        model = create_model(name if own else tagged_name(name))
        if own:
            create = f"'hf-hub:{repo_id}', pretrained=True"
            architecture = model.pretrained_cfg['architecture']
            card = re.sub("'local-dir:[^']*', pretrained=True", create, path.read_text()) if path.is_file() else \
                card_text(title, f'`{architecture}` with {model.num_classes} classes.', {}, create)
        else:
            card, weights = path.read_text(), weights_file(timm.get_pretrained_cfg(tagged_name(name)))
        tqdm.write(publish(model, repo_id, card, args.private, weights))
