"""Datasets and pictures: opening, preprocessing, classifying."""
from pathlib import Path
from typing import Any, Dict, IO, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import torch.nn as nn
from PIL import Image, ImageOps
from timm.data import ImageDataset, create_dataset, create_transform
from timm.data.model_config import resolve_input_data_config
from timm.data.readers import add_img_extensions
from torch.utils.data import IterableDataset
from torchvision.transforms import Compose, Grayscale
from tqdm import trange

from timm_selfconv.files import PICTURES
from timm_selfconv.weights.loading import require_hub

__all__ = [
    'PictureDataset', 'class_names', 'classify', 'data_config', 'data_name', 'label_names', 'load_images',
    'match_classes', 'open_dataset', 'open_images', 'picture_transform', 'preprocess', 'rank_classes',
    'sample_pictures', 'to_picture', 'top_classes']

Images = Tuple[torch.Tensor, torch.Tensor]  # uint8, shape (N, C, H, W), and their labels, shape (N,)
DATA_KEYS = ('input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std')  # of a timm configuration
add_img_extensions(PICTURES)  # timm's readers take fewer of a folder
SPLITS = ('train', 'training', 'val', 'validation', 'eval', 'test')  # names that timm looks for in a folder


def label_names(model: nn.Module) -> Tuple[str, ...]:
    """Names of a model's classes as its configuration has them; empty if it has none.

    Raises:
        ValueError: If they are not a list of names.
    """
    names = getattr(model, 'pretrained_cfg', {}).get('label_names') or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the model's configuration has label_names={names!r}: needs a list of names")
    return tuple(names)


def class_names(model: nn.Module, num_classes: int) -> Tuple[str, ...]:
    """Names of a model's classes, or their numbers if its configuration has no names for all of them."""
    names = label_names(model)
    return names if len(names) == num_classes else tuple(str(i) for i in range(num_classes))


def data_config(model: nn.Module) -> Dict[str, Any]:
    """Preprocessing that a model's configuration asks for (timm's `resolve_input_data_config`), checked.

    Raises:
        ValueError: If its configuration, which may be one from the Hub, makes no sense.
    """
    try:
        config = resolve_input_data_config(model)
        create_transform(**config)(Image.new('RGB', (2, 2)))
    except Exception as e:  # whatever timm, torchvision and PIL make of it
        keys = {key: value for key, value in getattr(model, 'pretrained_cfg', {}).items() if key in DATA_KEYS}
        raise ValueError(f"the model's configuration {keys} cannot be used ({type(e).__name__}: {e})") from e
    return config


def picture_transform(model: nn.Module, normalize: bool = True) -> Any:
    """timm's transform of an RGB picture to what a model takes, grey pictures where that is one channel.

    Raises:
        ValueError: See :func:`data_config`.
    """
    config = data_config(model)
    transform = create_transform(**config, normalize=normalize)
    return Compose([Grayscale(), transform]) if config['input_size'][0] == 1 else transform


def to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Scale greys of 16 bits, or floats from 0 to 1, to 8 bits; PIL's own conversion takes 255 for white and clips."""
    if image.mode[0] not in 'IF':
        return image
    values, white = np.asarray(image, np.float64), 1 if image.mode == 'F' else 65535
    scaled = image.mode != 'I' or image.format in ('PNG', 'PPM')  # whose 16 bits PIL may open as 32
    if not scaled or not ((values >= 0) & (values <= white)).all():
        raise ValueError(
            f'image {name!r}: mode {image.mode!r} with values from {values.min():g} to {values.max():g} does not say '
            'which is white, needs 8 or 16 bits, or floats from 0 to 1')
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8))


def read_picture(file: Union[str, Path, IO[bytes]], name: str) -> Image.Image:
    """A picture as RGB, upright as its camera says; a ValueError names one that can't be read whole."""
    try:
        with Image.open(file) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return to_eight_bits(image, name).convert('RGB')
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:  # a truncated picture is the first or the second
        raise ValueError(f'image {name!r}: needs a readable picture file ({type(e).__name__})') from e


class PictureDataset(ImageDataset):
    """timm's ImageDataset, where a picture that can't be read is an error; timm's own takes its neighbour instead."""

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        file, label = self.reader[index]
        with file:
            image = read_picture(file, str(getattr(file, 'name', f'number {index} of the dataset')))
        return (self.transform(image) if self.transform else image,
                self.target_transform(label) if self.target_transform else label)


def label_numbers(dataset: Any) -> Dict[str, int]:
    """Labels of a dataset by the names of its classes; empty if it has none."""
    return getattr(getattr(dataset, 'reader', dataset), 'class_to_idx', None) or {}


def match_classes(model: nn.Module, dataset: Any) -> Optional[Dict[int, int]]:
    """Map each label of a dataset to a model's class, by their names.

    Returns:
        Class by label; None where one of them has no names, so that numbers are all there is.

    Raises:
        ValueError: If the dataset has names that the model has not.
    """
    def plain(name: str) -> str:
        return name.lower().replace('_', ' ').replace('-', ' ').strip()

    labels = label_numbers(dataset)
    names = list(label_names(model))
    if not names or len(names) != getattr(model, 'num_classes', len(names)) or not labels:
        return None
    for spelled in (str, plain):  # as they are, else loosely, where that leaves them distinct
        classes = {spelled(name): i for i, name in enumerate(names)}
        wanted = {spelled(name) for name in labels}
        if len(classes) == len(names) and len(wanted) == len(labels) and wanted <= classes.keys():
            return {label: classes[spelled(name)] for name, label in labels.items()}
    if all(name.isdecimal() for name in labels):  # folders 0, 1, 2, ...
        return {label: int(name) for name, label in labels.items()}
    raise ValueError(
        f"classes: the dataset's are {sorted(labels)}, the model's {names}; name folders as the model does, give a "
        f'class map, or train a net for these: timm-selfconv finetune, or the key num_classes={len(labels)}')


def open_dataset(
        data: str,
        split: str,
        data_dir: Optional[str],
        input_key: str,
        target_key: Optional[str],
        class_map: Any = None,
) -> Any:
    """timm's dataset of a name or folder; a folder with parquet files is read as the Hub's layout.

    Args:
        data: Folder or name.
        split: Split of the dataset.
        data_dir: Folder of a named dataset's files, for those that need it.
        input_key: Column of the images, for the Hub's layout.
        target_key: Column of the labels, for the Hub's layout; None if they are not needed.
        class_map: timm's: a file with a class name per line, or a dictionary, that gives labels their numbers.

    Raises:
        ValueError: If it is neither, can't be had, or has no images.
    """
    folder = Path(data)
    is_folder = bool(data) and folder.is_dir()
    if is_folder and next(folder.rglob('*.parquet'), None):
        data, is_folder = f'hfds/{data}', False
    reader, _, name = data.partition('/')
    of_hub = reader in ('hfds', 'hfids')
    columns: Dict[str, Any] = dict(input_key=input_key, target_key=target_key or input_key) if of_hub else {}
    if not is_folder and (not name or reader not in ('hfds', 'hfids', 'tfds', 'torch', 'wds')):
        raise ValueError(f"data={data!r}: needs a folder or a timm dataset name, e.g. 'hfds/uoft-cs/cifar10'")
    label: Any = 0
    try:
        if of_hub and not Path(name).exists():
            require_hub()
        source = ('', data) if is_folder else (data, data_dir)
        dataset = create_dataset(*source, split=split, class_map=class_map, **columns)
        if reader == 'hfds' and len(dataset):
            _, label = dataset.reader[0]
    except ImportError as e:
        extra = "pip install 'timm_selfconv[data]' first" if columns else 'needs a package that is not installed'
        raise ValueError(f'data={data!r}: {extra} ({e})') from e
    except Exception as e:  # timm's readers and the libraries under them raise anything for data that they can't read
        offline = isinstance(e, OSError)
        needs = f'; needs the columns {input_key=}, {target_key=}' if columns and not offline else ''
        raise ValueError(
            f'data={data!r}, {data_dir=}, {split=}: cannot be read ({e or type(e).__name__}){needs}') from e
    if target_key is not None and not isinstance(label, int):
        raise ValueError(f'data={data!r}, {target_key=}: needs a column of class numbers, has {type(label).__name__}')
    if is_folder:
        splits = [name for name in SPLITS if (folder / name).is_dir()]
        if '[' in split or (splits and Path(dataset.reader.root) == folder):  # timm would take all pictures
            raise ValueError(f'split={split!r}: needs one of {splits} in the folder {data!r}')
    if not len(dataset):
        raise ValueError(f'data={data!r}: split {split!r} has no images')
    return PictureDataset('', dataset.reader) if isinstance(dataset, ImageDataset) else dataset


def check_numbered(dataset: Any) -> None:
    """Raise a ValueError for a stream, whose pictures have no numbers."""
    if isinstance(dataset, IterableDataset):
        raise ValueError("data: is a stream, which eval takes, needs pictures by number, e.g. 'hfds/...'")


def data_name(data: str) -> str:
    """A dataset as model cards name it: a folder without the path to it."""
    folder = Path(data.removeprefix('hfds/'))
    return folder.resolve().name if folder.is_dir() else data


def sample_pictures(
        data: str, split: str, data_dir: Optional[str], input_key: str, count: int) -> List[Image.Image]:
    """Sample pictures of a dataset, see :func:`open_dataset`, evenly spaced: a sorted one gives all of its classes.

    Raises:
        ValueError: If the dataset can't be had or is a stream, or no picture is asked for.
    """
    if count < 1:
        raise ValueError(f'count={count}: needs at least 1')
    dataset = open_dataset(data, split, data_dir, input_key, None)
    check_numbered(dataset)
    count = min(count, len(dataset))
    numbers = trange(count, desc='pictures', leave=False, disable=None)
    return [dataset[i * len(dataset) // count][0].convert('RGB') for i in numbers]


def open_images(paths: Sequence[Union[str, Path]]) -> List[Image.Image]:
    """Open pictures as RGB.

    Raises:
        ValueError: If a file is not there or not a picture; it is named.
    """
    return [read_picture(path, str(path)) for path in paths]


def preprocess(model: nn.Module, images: Sequence[Image.Image]) -> torch.Tensor:
    """Pictures of any size as a model's configuration says it takes them, shape (B, C, height, width)."""
    transform = picture_transform(model)
    return torch.stack([transform(image) for image in images])


def to_picture(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of a net's input, shape (C, height, width): RGB, shape (height, width, 3), from 0 to 1."""
    config = resolve_input_data_config(model)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ('mean', 'std'))
    return (image.cpu().float() * std + mean).clamp(0., 1.).expand(3, -1, -1).permute(1, 2, 0)


def rank_classes(model: nn.Module, batch: torch.Tensor) -> List[List[Tuple[str, float]]]:
    """Names and probabilities of all classes for each image, shape (B, C, height, width), the most probable first."""
    with torch.inference_mode():
        probs, order = model(batch).float().softmax(dim=-1).sort(descending=True, stable=True)
    names = class_names(model, probs.shape[1])
    return [[(names[i], p) for p, i in zip(*row)] for row in zip(probs.tolist(), order.tolist())]


def top_classes(model: nn.Module, images: Sequence[Image.Image], count: int) -> List[List[Tuple[str, float]]]:
    """Names and probabilities of each picture's most probable classes, in order; see :func:`classify`."""
    return [ranked[:count] for ranked in rank_classes(model.eval(), preprocess(model, images))]


def classify(model: nn.Module, images: Sequence[Image.Image]) -> List[Tuple[str, float]]:
    """Name and probability of each picture's most probable class, preprocessed as the model's configuration says."""
    return [best[0] for best in top_classes(model, images, 1)]


def load_images(dataset: Any, model: nn.Module, device: torch.device) -> Images:
    """A whole dataset on the device, resized and cropped as a model's configuration asks for.

    Args:
        dataset: See :func:`open_dataset`; its transform is replaced.
        model: One with a timm configuration.
        device: Device for the images.

    Raises:
        ValueError: If it is a stream, or pictures can't be read; they are named, three at most.
    """
    check_numbered(dataset)
    dataset.transform = picture_transform(model, normalize=False)
    rows, unreadable = [], []
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
