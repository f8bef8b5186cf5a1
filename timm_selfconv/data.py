"""Datasets and pictures: from a name, a folder or a file to what a net takes, and back to what the eye takes."""
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform, resolve_data_config

__all__ = ['class_names', 'classify', 'open_dataset', 'open_images', 'preprocess', 'to_picture']

SPLITS = ('train', 'training', 'val', 'validation', 'eval', 'test')  # names that timm looks for in a folder


def class_names(model: nn.Module, num_classes: int) -> Tuple[str, ...]:
    """Names of a model's classes, their numbers where its configuration knows none that fit."""
    names = tuple(getattr(model, 'pretrained_cfg', {}).get('label_names') or ())
    return names if len(names) == num_classes else tuple(str(i) for i in range(num_classes))


def open_dataset(data: str, split: str, data_dir: Optional[str], input_key: str, target_key: str) -> ImageDataset:
    """timm's dataset of a name or folder; a folder with parquet files is read as the Hub's layout.

    Raises:
        ValueError: If it is neither, or has no images.
    """
    folder = Path(data)
    if folder.is_dir() and next(folder.rglob('*.parquet'), None):
        data = f'hfds/{data}'
    if data.startswith('hfds/'):
        dataset = create_dataset(data, None, split=split, input_key=input_key, target_key=target_key)
    elif folder.is_dir():
        dataset = create_dataset('', data, split=split)
        splits = [name for name in SPLITS if (folder / name).is_dir()]
        if '[' in split or (splits and Path(dataset.reader.root) == folder):  # timm would take all that there is
            raise ValueError(f'split={split!r}: needs one of {splits} in the folder {data!r}')
    elif '/' in data and not folder.is_absolute() and data.split('/')[0] in ('torch', 'tfds', 'wds', 'hfids'):
        dataset = create_dataset(data, data_dir, split=split)
    else:
        raise ValueError(f"data={data!r}: needs a folder or a timm dataset name, e.g. 'hfds/uoft-cs/cifar10'")
    if not len(dataset):
        raise ValueError(f'data={data!r}: split {split!r} has no images')
    return dataset


def open_images(paths: Sequence[Union[str, Path]]) -> List[Image.Image]:
    """Open pictures as RGB.

    Raises:
        ValueError: If a file is not there or not a picture; it is named.
    """
    images = []
    for path in paths:
        try:
            with Image.open(path) as image:
                images.append(image.convert('RGB'))
        except OSError as e:  # UnidentifiedImageError is one, and so is what a truncated picture raises
            raise ValueError(f'image {str(path)!r}: needs a readable picture file ({type(e).__name__})') from e
    return images


def preprocess(model: nn.Module, images: Sequence[Image.Image]) -> torch.Tensor:
    """Pictures of any size as a model's configuration says it takes them, shape (B, C, height, width)."""
    transform = create_transform(**resolve_data_config({}, model=model))
    return torch.stack([transform(image) for image in images])


def to_picture(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """An image as a net takes it, shape (C, height, width), for the eye: shape (height, width, 3), from 0 to 1."""
    config = resolve_data_config({}, model=model)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ('mean', 'std'))
    return (image.cpu().float() * std + mean).clamp(0., 1.).expand(3, -1, -1).permute(1, 2, 0)


def classify(model: nn.Module, images: Sequence[Image.Image]) -> List[Tuple[str, float]]:
    """Most probable class of each picture, preprocessed as the model's configuration says.

    Args:
        model: The classifier, with a timm configuration.
        images: Pictures of any size.

    Returns:
        Class name and probability of each picture.
    """
    model = model.eval()
    with torch.inference_mode():
        probs = model(preprocess(model, images)).float().softmax(dim=-1)
    best = probs.max(dim=-1)
    names = class_names(model, probs.shape[1])
    return [(names[int(i)], float(p)) for p, i in zip(best.values, best.indices)]
