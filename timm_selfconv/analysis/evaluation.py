"""How good a net is: accuracy on a dataset, and the class of single pictures."""
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_loader, create_transform, resolve_data_config
from tqdm import tqdm

__all__ = ['Evaluation', 'classify', 'evaluate', 'open_dataset', 'open_images', 'preprocess', 'to_picture']

SPLITS = ('train', 'training', 'val', 'validation', 'eval', 'test')  # names that timm looks for in a folder


@dataclass(frozen=True)
class Evaluation:
    """Accuracies between 0 and 1 on a number of images, and how many went through a second, decoding included."""
    top1: float
    top5: float
    per_class: Dict[str, float]
    images: int
    images_per_second: float


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


def evaluate(
        model: nn.Module,
        data: str,
        split: str = 'test',
        batch_size: int = 64,
        data_dir: Optional[str] = None,
        input_key: str = 'img',
        target_key: str = 'label',
        device: str = 'cpu',
        progress: bool = True,
) -> Evaluation:
    """Evaluate a classifier in eval mode, on images preprocessed as its configuration says.

    Args:
        model: The classifier, with a timm configuration.
        data: A folder in the Hub's parquet layout, a folder of one folder a class, or any dataset name of timm's
            ('hfds/uoft-cs/cifar10', 'torch/cifar10', ...).
        split: Split of the dataset.
        batch_size: Images a batch.
        data_dir: Where the files of a named dataset lie, for those that need it ('torch/cifar10').
        input_key: Column of the images, for the Hub's layout.
        target_key: Column of the labels, for the Hub's layout.
        device: Where the model runs.
        progress: Show a progress bar.

    Returns:
        Accuracies over all images of the split.

    Raises:
        ValueError: If there is no such dataset, no images in it, or labels that the model has no class for.
    """
    dataset = open_dataset(data, split, data_dir, input_key, target_key)
    config = resolve_data_config({}, model=model)
    loader = create_loader(
        dataset,
        batch_size=batch_size,
        is_training=False,
        use_prefetcher=False,
        num_workers=0,
        pin_memory=False,
        device=torch.device(device),
        **{k: config[k] for k in ('input_size', 'interpolation', 'mean', 'std', 'crop_pct', 'crop_mode')},
    )
    model = model.to(device).eval()
    predictions, labels = [], []
    start = time.perf_counter()
    with torch.inference_mode():
        for images, target in tqdm(loader, unit='batch', disable=not progress):
            logits = model(images.to(device))
            predictions.append(logits.topk(min(5, logits.shape[1])).indices.cpu())
            labels.append(target)
    seconds = time.perf_counter() - start

    label, num_classes = torch.cat(labels), logits.shape[1]
    if int(label.max()) >= num_classes or int(label.min()) < 0:
        raise ValueError(
            f'data={data!r}: has labels from {int(label.min())} to {int(label.max())}, '
            f'but the model has {num_classes} classes')
    hit = torch.cat(predictions) == label[:, None]
    top1, top5 = hit[:, 0].double(), hit.any(1).double()
    names = class_names(model, num_classes)
    per_class = {n: float(top1[label == i].mean()) for i, n in enumerate(names) if (label == i).any()}
    return Evaluation(float(top1.mean()), float(top5.mean()), per_class, len(label), len(label) / seconds)


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
