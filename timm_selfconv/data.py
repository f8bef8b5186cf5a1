"""Datasets and pictures: opening, preprocessing, classifying."""
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, IO, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import torch.nn as nn
from PIL import Image, ImageOps
from timm.data import ImageDataset, create_dataset, create_transform
from timm.data.model_config import resolve_input_data_config
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.transforms import Compose, Grayscale
from tqdm import trange

from timm_selfconv.files import PICTURES, natural_key, picture_files
from timm_selfconv.weights.loading import require_hub

__all__ = [
    'PictureDataset', 'PictureReader', 'check_labels', 'class_names', 'data_config', 'data_name', 'first_folder',
    'label_names', 'load_images', 'match_classes', 'open_dataset', 'open_images', 'picture_transform', 'preprocess',
    'rank_classes', 'sample_pictures', 'to_picture', 'top_classes']

Images = Tuple[torch.Tensor, torch.Tensor]  # uint8, shape (N, C, H, W), and their labels, shape (N,)
DATA_KEYS = ('input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std')  # keys of a timm configuration
TRAIN, VALIDATION = ('train', 'training'), ('val', 'valid', 'validation', 'eval', 'evaluation')  # as in timm


def label_names(model: nn.Module) -> Tuple[str, ...]:
    """Return the class names in a model's configuration, which may be empty; raise a ValueError if they are invalid."""
    names = getattr(model, 'pretrained_cfg', {}).get('label_names') or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the model's configuration has label_names={names!r}: needs a list of names")
    return tuple(names)


def class_names(model: nn.Module, num_classes: int) -> Tuple[str, ...]:
    """Return the names of a model's classes, or their numbers if names are missing."""
    names = label_names(model)
    return names if len(names) == num_classes else tuple(str(i) for i in range(num_classes))


def data_config(model: nn.Module) -> Dict[str, Any]:
    """Return the preprocessing in a model's configuration; raise a ValueError if it is invalid."""
    try:
        config = resolve_input_data_config(model)
        create_transform(**config)(Image.new('RGB', (2, 2)))
    except Exception as e:  # timm, torchvision and PIL raise many types
        keys = {key: value for key, value in getattr(model, 'pretrained_cfg', {}).items() if key in DATA_KEYS}
        raise ValueError(f"the model's configuration {keys} cannot be used ({type(e).__name__}: {e})") from e
    return config


def picture_transform(model: nn.Module, normalize: bool = True) -> Any:
    """Return timm's transform of an RGB picture to a model's input, in grey if the model has one input channel."""
    config = data_config(model)
    transform = create_transform(**config, normalize=normalize)
    return Compose([Grayscale(), transform]) if config['input_size'][0] == 1 else transform


def to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Scale 16-bit grey values, or floats from 0 to 1, to 8 bits. PIL's conversion clips at 255."""
    values, white = np.asarray(image, np.float64), 1 if image.mode == 'F' else 65535
    scaled = image.mode != 'I' or image.format in ('PNG', 'PPM')  # PIL may open 16 bits as 32
    if not scaled or not ((values >= 0) & (values <= white)).all():
        raise ValueError(
            f'image {name!r}: mode {image.mode!r} with values from {values.min():g} to {values.max():g} has an unknown '
            'range: needs 8 or 16 bits, or floats from 0 to 1')
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8))


def read_picture(file: Union[str, Path, IO[bytes]], name: str) -> Image.Image:
    """Read a picture as RGB with its EXIF orientation; raise a ValueError with its name if it cannot be decoded."""
    try:
        with Image.open(file) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode[0] not in 'IF':
                return image.convert('RGB')
    except FileNotFoundError as e:
        raise ValueError(f'{name}: no such file') from e
    except Exception as e:  # PIL's decoders raise many types
        raise ValueError(f'image {name!r}: needs a readable picture file ({type(e).__name__})') from e
    return to_eight_bits(image, name).convert('RGB')


class PictureReader(ReaderImageFolder):
    """Reader of pictures with a folder per class, numbered in natural order."""

    def __init__(self, root: Union[str, Path]):
        self.root = str(root)
        files = picture_files(root)
        if not files:
            raise ValueError(f'folder={self.root!r}: has no pictures ({", ".join(PICTURES)})')
        names = [file.parent.name if file.parent != Path(root) else '' for file in files]
        self.class_to_idx = {name: i for i, name in enumerate(sorted(set(names), key=natural_key))}
        self.samples = [(str(file), self.class_to_idx[name]) for file, name in zip(files, names)]


class PictureDataset(ImageDataset):
    """timm's ImageDataset that raises an error for an unreadable picture. timm skips it."""

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        file, label = self.reader[index]
        with file:
            image = read_picture(file, str(getattr(file, 'name', f'number {index} of the dataset')))
        return (self.transform(image) if self.transform else image,
                self.target_transform(label) if self.target_transform else label)


def check_labels(what: str, labels: torch.Tensor, num_classes: int) -> None:
    """Raise a ValueError, which begins with ``what``, for labels that are not class numbers."""
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise ValueError(f'{what}: labels from {low} to {high} do not fit a net with {num_classes} classes')


def label_numbers(dataset: PictureDataset) -> Dict[str, int]:
    return getattr(dataset.reader, 'class_to_idx', None) or {}


def match_classes(model: nn.Module, dataset: PictureDataset) -> Optional[Dict[int, int]]:
    """Map each label of a dataset to a model's class by name; None means that labels are class numbers already.

    If the model has no names, names of the dataset may be class numbers.

    Raises:
        ValueError: If the model lacks a class of the dataset.
    """
    def plain(name: str) -> str:
        return name.lower().replace('_', ' ').replace('-', ' ').strip()

    labels, names = label_numbers(dataset), list(label_names(model))
    if not labels:
        return None
    if not names or len(names) != getattr(model, 'num_classes', len(names)):
        numbers = all(name.isdecimal() for name in labels)  # folders 0, 1, 2, ...
        return {label: int(name) for name, label in labels.items()} if numbers else None
    for spelled in (str, plain):  # exact names, then loose ones if they stay distinct
        classes = {spelled(name): i for i, name in enumerate(names)}
        wanted = {spelled(name) for name in labels}
        if len(classes) == len(names) and len(wanted) == len(labels) and wanted <= classes.keys():
            return {label: classes[spelled(name)] for name, label in labels.items()}
    raise ValueError(
        f'classes: the dataset has {sorted(labels)}, the model has {names}; rename the folders, or train a model for '
        f'these classes (timm-selfconv finetune, or the key num_classes={len(labels)})')


def column_names(data: str) -> List[str]:
    with suppress(Exception):  # only for an error message
        import datasets
        return next(iter(datasets.load_dataset(data).values())).column_names
    return []


def first_folder(folder: Path, *names: str) -> Optional[Path]:
    """Return the first of these subfolders that exists, or None."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def open_folder(folder: Path, split: str) -> PictureDataset:
    """Open FOLDER/SPLIT/CLASS/PICTURE, or FOLDER/CLASS/PICTURE if the folder has no splits."""
    like = next((names for names in (TRAIN, VALIDATION) if split in names), ())
    root = first_folder(folder, split, *like)
    splits = [name for name in (*TRAIN, *VALIDATION, 'test') if (folder / name).is_dir()]
    if root is None and (splits or '[' in split):
        names = splits or [split.partition('[')[0]]  # without splits, any name means all pictures
        raise ValueError(f'split={split!r}: needs one of {names} in the folder {str(folder)!r}')
    return PictureDataset('', PictureReader(root or folder))


def open_dataset(
        data: str, split: str, input_key: str = 'img', target_key: Optional[str] = 'label') -> PictureDataset:
    """Open a folder of pictures, a folder of parquet files in the Hub's layout, or a dataset of the Hub.

    A dataset of the Hub has the name that timm gives it, 'hfds/OWNER/NAME'. ``input_key`` and ``target_key`` are the
    columns of images and labels (None without labels). Raises a ValueError if data, columns or images are missing.
    """
    folder = Path(data)
    if data and folder.is_dir():
        if not picture_files(folder, ('.parquet',)):
            return open_folder(folder, split)
        data = f'hfds/{data}'
    reader, _, name = data.partition('/')
    if not name or reader != 'hfds':
        raise ValueError(f"data={data!r}: needs a folder or a dataset of the Hub, e.g. 'hfds/uoft-cs/cifar10'")
    try:
        if not Path(name).exists():
            require_hub()
        dataset = create_dataset(data, None, split=split, input_key=input_key, target_key=target_key or input_key)
        label = dataset.reader[0][1] if len(dataset) else 0
    except ImportError as e:
        raise ValueError(f"data={data!r}: pip install 'timm_selfconv[data]' first ({e})") from e
    except Exception as e:  # readers raise many types
        has, why = column_names(name), f'cannot be read ({e or type(e).__name__})'
        if has and not {input_key, target_key or input_key} <= {*has}:
            why = f'needs the columns {input_key=}, {target_key=}, has {has}'
        raise ValueError(f'data={data!r}, {split=}: {why}') from e
    if target_key is not None and not isinstance(label, int):
        raise ValueError(f'data={data!r}, {target_key=}: needs a column of class numbers, has {type(label).__name__}')
    if not len(dataset):
        raise ValueError(f'data={data!r}: split {split!r} has no images')
    return PictureDataset('', dataset.reader)


def data_name(data: str) -> str:
    """Return the name of a dataset for model cards: a folder without its path."""
    folder = Path(data.removeprefix('hfds/'))
    return folder.resolve().name if folder.is_dir() else data


def sample_pictures(data: str, split: str, input_key: str, count: int) -> List[Image.Image]:
    """Sample evenly spaced pictures of a dataset (:func:`open_dataset`), so that a sorted one gives all classes."""
    dataset = open_dataset(data, split, input_key, None)
    numbers = trange(min(count, len(dataset)), desc='pictures', leave=False, disable=None)
    return [dataset[i * len(dataset) // len(numbers)][0] for i in numbers]


def open_images(paths: Sequence[Union[str, Path]]) -> List[Image.Image]:
    """Open pictures as RGB; raise a ValueError with the name of a file that is missing or not a picture."""
    return [read_picture(path, str(path)) for path in paths]


def preprocess(model: nn.Module, images: Sequence[Image.Image]) -> torch.Tensor:
    """Preprocess pictures of any size for a model, shape (B, C, height, width), on its device and in its dtype."""
    transform = picture_transform(model)
    return torch.stack([transform(image) for image in images]).to(next(model.parameters()))


def to_picture(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """Convert a normalised input, shape (C, height, width), to RGB from 0 to 1, shape (height, width, 3)."""
    config = resolve_input_data_config(model)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ('mean', 'std'))
    return (image.cpu().float() * std + mean).clamp(0., 1.).expand(3, -1, -1).permute(1, 2, 0)


def rank_classes(model: nn.Module, batch: torch.Tensor) -> List[List[Tuple[str, float]]]:
    """Return names and probabilities of all classes for images, shape (B, C, height, width), most probable first."""
    with torch.inference_mode():
        probs, order = model(batch).float().softmax(dim=-1).sort(descending=True, stable=True)
    names = class_names(model, probs.shape[1])
    return [[(names[i], p) for p, i in zip(*row)] for row in zip(probs.tolist(), order.tolist())]


def top_classes(model: nn.Module, images: Sequence[Image.Image], count: int) -> List[List[Tuple[str, float]]]:
    """Preprocess pictures, and return names and probabilities of their most probable classes."""
    return [ranked[:count] for ranked in rank_classes(model.eval(), preprocess(model, images))]


def load_images(dataset: PictureDataset, model: nn.Module, device: torch.device) -> Images:
    """Load a dataset (:func:`open_dataset`) into memory, preprocessed for a model but not normalised.

    Raises:
        ValueError: If pictures cannot be read; it names the first three.
    """
    dataset.transform = picture_transform(model, normalize=False)
    rows: List[Any] = []
    unreadable: List[str] = []
    for i in trange(len(dataset), desc='reading', unit='picture', leave=False, disable=None):
        try:
            rows.append(dataset[i])
        except ValueError as e:
            unreadable.append(str(e))
    if unreadable:
        more = f'; and {len(unreadable) - 3} more' if len(unreadable) > 3 else ''
        raise ValueError('; '.join(unreadable[:3]) + more)
    images, labels = zip(*rows)
    return torch.stack(images).to(device), torch.tensor(labels, device=device)
