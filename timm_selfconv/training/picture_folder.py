"""Pictures of one's own: a folder with a folder a class, checked, and which of them are held out."""
import copy
from pathlib import Path
from typing import Any, List, Set, Tuple, Union

import torch
from timm.data.readers import get_img_extensions
from timm.data.readers.reader_image_folder import ReaderImageFolder

from timm_selfconv.data import SPLITS, PictureDataset

__all__ = ['open_picture_folder']

HELD_OUT = 0.2  # of each class, where a folder has no pictures to validate on


def read_classes(folder: Path) -> Any:
    """timm's reader of FOLDER/CLASS/PICTURE, which numbers classes in their names' order; each has pictures."""
    needs = f'needs pictures ({", ".join(get_img_extensions())}) in {folder / "CLASS"}'
    try:
        reader = ReaderImageFolder(str(folder))
    except RuntimeError as e:
        raise ValueError(f'folder={str(folder)!r}: {needs}, has none') from e
    strays = [file for file, _ in reader.samples if len(Path(file).relative_to(folder).parts) != 2]
    if strays:
        raise ValueError(f'folder={str(folder)!r}: {needs}, has {len(strays)} elsewhere, such as {strays[0]}')
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != '.')
    empty = [name for name in names if name not in reader.class_to_idx]
    if empty:
        raise ValueError(f'folder={str(folder)!r}: {needs}, has none of {empty}')
    return reader


def hold_out(reader: Any, share: float, seed: int) -> List[Any]:
    """The readers of two parts of the pictures of another, the second a share of each class drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    held: Set[Tuple[str, int]] = set()
    for name, label in reader.class_to_idx.items():
        samples = [sample for sample in reader.samples if sample[1] == label]
        if len(samples) < 2:
            raise ValueError(f'folder={reader.root!r}: needs 2 pictures of {name!r}, one to hold out, has 1')
        samples = [samples[i] for i in torch.randperm(len(samples), generator=generator)]
        held.update(samples[:max(1, round(share * len(samples)))])
    parts = [copy.copy(reader), copy.copy(reader)]
    for part, wanted in zip(parts, (False, True)):
        part.samples = [sample for sample in reader.samples if (sample in held) == wanted]
    return parts


def open_picture_folder(folder: Union[str, Path], seed: int) -> Tuple[PictureDataset, PictureDataset, str]:
    """Pictures to train on and to validate on, of the same classes.

    Args:
        folder: FOLDER/train/CLASS and FOLDER/val (or validation, eval, test) /CLASS; without the latter, and of
            FOLDER/CLASS, a share is held out.
        seed: Seed that draws that share.

    Returns:
        Both datasets, and in words what the second one is.

    Raises:
        ValueError: If there is no such folder, it has one class only, classes without pictures, or other classes to
            validate on, one picture of a class to hold one out of, or pictures elsewhere.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f'folder={str(folder)!r}: there is none')
    train, validation = (next((folder / name for name in names if (folder / name).is_dir()), None)
                         for names in (SPLITS[:2], SPLITS[2:]))
    if validation is not None and train is None:
        raise ValueError(f'folder={str(folder)!r}: has {validation.name}, needs train beside it')
    reader = read_classes(train or folder)
    if len(reader.class_to_idx) < 2:
        raise ValueError(f'folder={reader.root!r}: needs 2 classes at least, has {list(reader.class_to_idx)}')
    if validation is not None:
        readers, told = [reader, read_classes(validation)], f'those in {validation.name}'
        classes, found = (list(each.class_to_idx) for each in readers)
        if found != classes:
            raise ValueError(f'folder={str(validation)!r}: needs the classes to train on, {classes}, has {found}')
    else:
        readers, told = hold_out(reader, HELD_OUT, seed), f'{HELD_OUT:.0%} of each class, drawn by seed {seed}'
    return PictureDataset('', readers[0]), PictureDataset('', readers[1]), told
