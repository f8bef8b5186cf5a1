"""Pictures of one's own: a folder with a folder a class, checked, and the pictures that are held out."""
import copy
from pathlib import Path
from typing import Any, List, Set, Tuple, Union

import torch

from timm_selfconv.data import TRAIN, VALIDATION, PictureDataset, PictureReader, first_folder
from timm_selfconv.files import PICTURES, is_hidden

__all__ = ['open_picture_folder']

HELD_OUT = 0.2  # of each class, where a folder has no pictures to validate on


def read_classes(folder: Path) -> PictureReader:
    """A reader of FOLDER/CLASS/PICTURE; a ValueError if a class has no pictures or there are pictures elsewhere."""
    reader, where = PictureReader(folder), f'folder={str(folder)!r}'
    strays = [file for file, _ in reader.samples if len(Path(file).relative_to(folder).parts) != 2]
    if strays:
        raise ValueError(f'{where}: needs pictures in {folder / "CLASS"}, has {len(strays)} elsewhere, as {strays[0]}')
    empty = sorted({p.name for p in folder.iterdir() if p.is_dir() and not is_hidden(p.name)} - {*reader.class_to_idx})
    if empty:
        raise ValueError(f'{where}: needs pictures ({", ".join(PICTURES)}) of each class, has none of {empty}')
    return reader


def hold_out(reader: PictureReader, seed: int) -> List[Any]:
    """Readers of two parts of the pictures: the second has a share of each class, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    held: Set[Tuple[str, int]] = set()
    for name, label in reader.class_to_idx.items():
        samples = [sample for sample in reader.samples if sample[1] == label]
        if len(samples) < 2:
            raise ValueError(f'folder={reader.root!r}: needs 2 pictures of {name!r}, one to hold out, has 1')
        order = torch.randperm(len(samples), generator=generator)
        held.update(samples[i] for i in order[:max(1, round(HELD_OUT * len(samples)))])
    parts = [copy.copy(reader), copy.copy(reader)]
    for part, wanted in zip(parts, (False, True)):
        part.samples = [sample for sample in reader.samples if (sample in held) == wanted]
    return parts


def open_picture_folder(folder: Union[str, Path], seed: int) -> Tuple[PictureDataset, PictureDataset, str]:
    """Open pictures to train on and to validate on, and tell in words where the latter are from.

    They are FOLDER/train/CLASS and FOLDER/val (or validation, eval, test) /CLASS. Without the latter, and of
    FOLDER/CLASS, a share is held out, drawn by the seed. A ValueError names a folder that makes no net: it has one
    class, classes without pictures, others to validate on, too few pictures to hold one out, or pictures elsewhere.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f'folder={str(folder)!r}: no such folder')
    train, validation = first_folder(folder, *TRAIN), first_folder(folder, *VALIDATION, 'test')
    if validation is not None and train is None:
        raise ValueError(f'folder={str(folder)!r}: has {validation.name}, needs train beside it')
    reader = read_classes(train or folder)
    if len(reader.class_to_idx) < 2:
        raise ValueError(f'folder={reader.root!r}: needs 2 classes at least, has {list(reader.class_to_idx)}')
    if validation is None:
        readers, told = hold_out(reader, seed), f'{HELD_OUT:.0%} of each class, drawn by seed {seed}'
    else:
        readers, told = [reader, read_classes(validation)], f'those in {validation.name}'
        classes, found = (list(each.class_to_idx) for each in readers)
        if found != classes:
            raise ValueError(f'folder={readers[1].root!r}: needs the classes to train on, {classes}, has {found}')
    return PictureDataset('', readers[0]), PictureDataset('', readers[1]), told
