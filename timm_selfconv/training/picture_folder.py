"""Folders of pictures with a folder per class: checks, and a random validation split."""
import copy
from pathlib import Path
from typing import Set, Tuple, Union

import torch

from timm_selfconv.data import TRAIN, VALIDATION, PictureDataset, PictureReader, first_folder
from timm_selfconv.files import PICTURES, is_hidden

__all__ = ['open_picture_folder']

HELD_OUT = 0.2  # fraction of each class, if a folder has no validation split


def read_classes(folder: Path) -> PictureReader:
    """Read FOLDER/CLASS/PICTURE; raise a ValueError for a class without pictures and for pictures elsewhere."""
    reader, where = PictureReader(folder), f'folder={str(folder)!r}'
    strays = [file for file, _ in reader.samples if len(Path(file).relative_to(folder).parts) != 2]
    if strays:
        raise ValueError(
            f'{where}: needs pictures in {folder / "CLASS"}, but {len(strays)} are elsewhere, e.g. {strays[0]}')
    empty = sorted({p.name for p in folder.iterdir() if p.is_dir() and not is_hidden(p.name)} - {*reader.class_to_idx})
    if empty:
        raise ValueError(
            f'{where}: each class needs a picture ({", ".join(PICTURES)}); these have no pictures: {empty}')
    return reader


def hold_out(reader: PictureReader, seed: int) -> Tuple[PictureReader, PictureReader]:
    """Split a reader in two; the second part has a random share of each class."""
    generator = torch.Generator().manual_seed(seed)
    held: Set[Tuple[str, int]] = set()
    for name, label in reader.class_to_idx.items():
        samples = [sample for sample in reader.samples if sample[1] == label]
        if len(samples) < 2:
            raise ValueError(
                f'folder={reader.root!r}: needs 2 pictures of each class or more, to hold one out; {name!r} has 1')
        order = torch.randperm(len(samples), generator=generator)
        held.update(samples[i] for i in order[:max(1, round(HELD_OUT * len(samples)))])
    rest, part = copy.copy(reader), copy.copy(reader)
    rest.samples = [sample for sample in reader.samples if sample not in held]
    part.samples = [sample for sample in reader.samples if sample in held]
    return rest, part


def open_picture_folder(folder: Union[str, Path], seed: int) -> Tuple[PictureDataset, PictureDataset, str]:
    """Open the training and validation pictures of a folder.

    They are in FOLDER/train/CLASS and FOLDER/val/CLASS (or validation, eval, test). Without a validation folder, or for
    FOLDER/CLASS, a random share of each class is held out.

    Returns:
        Both datasets, and the origin of the validation pictures in words.

    Raises:
        ValueError: If the folder has a single class, classes without pictures, different classes for validation, too
            few pictures to hold one out, or pictures in other places.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f'folder={str(folder)!r}: no such folder')
    train, validation = first_folder(folder, *TRAIN), first_folder(folder, *VALIDATION, 'test')
    if validation is not None and train is None:
        raise ValueError(f'folder={str(folder)!r}: has a folder {validation.name}, so it needs a folder train too')
    reader = read_classes(train or folder)
    classes = list(reader.class_to_idx)
    if len(classes) < 2:
        raise ValueError(f'folder={reader.root!r}: needs at least 2 classes, has {classes}')
    if validation is None:
        reader, held = hold_out(reader, seed)
        told = f'{HELD_OUT:.0%} of each class, drawn by seed {seed}'
    else:
        held, told = read_classes(validation), f'all pictures in {validation.name}'
        found = list(held.class_to_idx)
        if found != classes:
            raise ValueError(f'folder={held.root!r}: needs the training classes {classes}, has {found}')
    return PictureDataset('', reader), PictureDataset('', held), told
