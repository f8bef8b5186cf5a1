"""How good a net is: accuracy on a dataset, and the class of single pictures."""
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image, UnidentifiedImageError
from timm.data import create_dataset, create_loader, create_transform, resolve_data_config
from tqdm import tqdm

__all__ = ['Evaluation', 'classify', 'evaluate', 'open_images']


@dataclass(frozen=True)
class Evaluation:
    """Accuracies between 0 and 1 on a number of images, and how many went through a second, decoding included."""
    top1: float
    top5: float
    per_class: Dict[str, float]
    images: int
    images_per_second: float


def class_names(model: nn.Module) -> Tuple[str, ...]:
    """Names of a model's classes, their numbers where its configuration knows none that fit."""
    names = tuple(model.pretrained_cfg.get('label_names') or ())
    return names if len(names) == model.num_classes else tuple(str(i) for i in range(model.num_classes))


def dataset_name(data: str) -> str:
    """timm's name for a dataset: a folder with parquet files is read by `datasets`, others stay as they are."""
    folder = Path(data)
    return f'hfds/{data}' if folder.is_dir() and next(folder.rglob('*.parquet'), None) else data


def evaluate(
        model: nn.Module,
        data: str,
        split: str = 'test',
        batch_size: int = 128,
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
        input_key: Column of the images, for the Hub's layout.
        target_key: Column of the labels, for the Hub's layout.
        device: Where the model runs.
        progress: Show a progress bar.

    Returns:
        Accuracies over all images of the split.

    Raises:
        ValueError: If there are no images, or labels that the model has no class for.
    """
    name = dataset_name(data)
    root, name = (data, '') if Path(name).is_dir() else (None, name)
    dataset = create_dataset(name, root=root, split=split, input_key=input_key, target_key=target_key)
    if not len(dataset):
        raise ValueError(f'data={data!r}: split {split!r} has no images')
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

    hit = torch.cat(predictions) == torch.cat(labels)[:, None]
    label = torch.cat(labels)
    if int(label.max()) >= model.num_classes or int(label.min()) < 0:
        raise ValueError(
            f'data={data!r}: has labels from {int(label.min())} to {int(label.max())}, '
            f'but the model has {model.num_classes} classes')
    top1, top5 = hit[:, 0].double(), hit.any(1).double()
    per_class = {n: float(top1[label == i].mean()) for i, n in enumerate(class_names(model)) if (label == i).any()}
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
        except (FileNotFoundError, IsADirectoryError, UnidentifiedImageError) as e:
            raise ValueError(f'image {str(path)!r}: needs a readable picture file ({type(e).__name__})') from e
    return images


def classify(model: nn.Module, images: Sequence[Image.Image]) -> List[Tuple[str, float]]:
    """Most probable class of each picture, preprocessed as the model's configuration says.

    Args:
        model: The classifier, with a timm configuration.
        images: Pictures of any size.

    Returns:
        Class name and probability of each picture.
    """
    transform = create_transform(**resolve_data_config({}, model=model))
    batch = torch.stack([transform(image) for image in images])
    model = model.eval()
    with torch.inference_mode():
        probs = model(batch).float().softmax(dim=-1)
    best = probs.max(dim=-1)
    names = class_names(model)
    return [(names[int(i)], float(p)) for p, i in zip(best.values, best.indices)]
