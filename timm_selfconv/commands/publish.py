"""The command that puts the zoo on the Hub."""
import argparse
import tempfile
from pathlib import Path

from tqdm import tqdm

from timm_selfconv import hub
from timm_selfconv.data import open_images
from timm_selfconv.files import new_folder
from timm_selfconv.look.repository import write_repository
from timm_selfconv.weights import shipped_names
from .look import demo_pictures


def run_publish(args: argparse.Namespace) -> None:
    names = args.models or shipped_names()
    unknown = sorted(set(names) - set(shipped_names()))
    if unknown:
        raise ValueError(
            f'models={unknown}: no such weights; there are those of {shipped_names()}; the folder of a net of your own '
            'goes to the Hub by: hf upload OWNER/NAME FOLDER')
    paths = [Path(image) for image in args.images] or demo_pictures()[:2]
    pictures = dict(zip((path.stem for path in paths), open_images(paths)))
    for name in tqdm(names, unit='net', leave=False, disable=None):
        relatives = [other for other in names if other != name]
        if args.folder:
            with new_folder(Path(args.folder, name)) as folder:
                write_repository(name, folder, pictures, relatives)
            tqdm.write(str(Path(args.folder, name)))
            continue
        repo_id = f'{args.owner}/{name}'
        with tempfile.TemporaryDirectory() as temporary:
            write_repository(name, temporary, pictures, relatives)
            if args.dry_run:
                sent = hub.differing_files(Path(temporary), repo_id)
            else:
                sent = hub.publish(temporary, repo_id, args.private)
        tqdm.write(f'{repo_id}: {", ".join(sent) or "nothing new"}')
    if args.owner and not args.dry_run:
        print(hub.collect(names, args.owner))
