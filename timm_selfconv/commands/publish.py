"""The command that puts the zoo on the Hub."""
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tqdm import tqdm

from ._shared import picture
from .look import demo_pictures, distinct_names


def add_publish(parser: ArgumentParser) -> None:
    parser.add_argument('models', nargs='*', metavar='MODEL', help='nets that have weights (default: all)')
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument('--owner', metavar='ORG', help='whose repositories; log in with: hf auth login')
    target.add_argument('--output', '--folder', metavar='DIR', help='write the repositories here instead')
    parser.add_argument('--images', nargs='+', type=picture, default=[], metavar='IMAGE', help=(
        'pictures that the explorers show (default: two of those of demo)'))
    parser.add_argument('--private', action='store_true', help='make new repositories that only their owner can see')


def run_publish(args: Namespace) -> None:
    """Bring nets and their pages to the Hub, one commit of what has changed each."""
    from timm_selfconv.weights import checksums

    names = args.models or list(checksums())
    unknown = sorted(set(names) - set(checksums()))
    if unknown:
        raise ValueError(
            f'models={unknown}: no such weights; there are those of {list(checksums())}; the folder of a net of your '
            'own goes to the Hub by: hf upload OWNER/NAME FOLDER')
    paths = args.images or demo_pictures()[:2]
    from timm_selfconv.data import open_images
    from timm_selfconv.files import new_folder
    from timm_selfconv.look.repository import write_repository
    from timm_selfconv.weights.publishing import publish

    pictures = dict(zip(distinct_names([path.stem for path in paths]), open_images(paths)))
    for name in tqdm(names, unit='net', leave=False, disable=None):
        relatives = [other for other in names if other != name]
        if args.output:
            with new_folder(Path(args.output, name)) as folder:
                write_repository(name, folder, pictures, relatives)
            tqdm.write(str(Path(args.output, name)))
            continue
        repo_id = f'{args.owner}/{name}'
        with tempfile.TemporaryDirectory() as temporary:
            write_repository(name, temporary, pictures, relatives)
            news = publish(temporary, repo_id, args.private)
        tqdm.write(f'{repo_id}: {"published" if news else "nothing new"}')
