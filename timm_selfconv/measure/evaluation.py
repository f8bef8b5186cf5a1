"""Accuracy on a dataset."""
import copy
import hashlib
import time
from dataclasses import dataclass
from typing import Dict, Optional

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm import tqdm, trange

from timm_selfconv.data import check_labels, class_names, match_classes, open_dataset, picture_transform

__all__ = ['Evaluation', 'evaluate', 'is_cifar10_test']

# of CIFAR-10's test split: the sum, modulo 2^256, of the SHA-256 of each picture's RGB pixels and its class in a byte
CIFAR10_TEST = 0x7d79e752791e1a3f8555c99847bcbd1210edb70997e4519cd59bb1741e4f6ee7


@dataclass(frozen=True)
class Evaluation:
    """Accuracies between 0 and 1, the number of images, and the speed including decoding."""
    top1: float
    top5: float
    per_class: Dict[str, float]
    images: int
    images_per_second: float


def find_device(name: Optional[str]) -> torch.device:
    """Return a device by name; None is CUDA if available, else the CPU. Raises a ValueError if it cannot compute."""
    if name is None:
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        number = torch.zeros(1, device=name)
        number.item()  # fails on the meta device
    except (RuntimeError, AssertionError) as e:  # AssertionError: torch without CUDA
        raise ValueError(f'device={name!r}: needs a device of this machine ({e})') from e
    return number.device


def evaluate(
        model: nn.Module,
        data: str,
        split: str = 'test',
        batch_size: int = 64,
        input_key: str = 'img',
        target_key: str = 'label',
        device: Optional[str] = 'cpu',
) -> Evaluation:
    """Evaluate a classifier in eval mode, with the preprocessing of its configuration.

    The names of the labels are matched with ``label_names`` of the model.

    Args:
        model: The classifier, with a timm configuration. It does not change.
        data: A folder in the parquet layout of the Hub, a folder with a folder per class, or a dataset of the Hub
            ('hfds/uoft-cs/cifar10').
        input_key, target_key: Columns of images and labels.
        device: Device of torch; None is CUDA if available, else the CPU.

    Raises:
        ValueError: If dataset or device do not exist, the dataset is empty, an image cannot be read, or the model has
            no class for a label.
    """
    on = find_device(device)
    dataset = open_dataset(data, split, input_key, target_key)
    classes = match_classes(model, dataset)
    if classes is not None:
        dataset.target_transform = classes.__getitem__
    dataset.transform = picture_transform(model)
    loader = DataLoader(dataset, batch_size)
    model = copy.deepcopy(model).to(on).eval()
    predictions, labels = [], []
    start = time.perf_counter()
    with torch.inference_mode():
        for images, target in tqdm(loader, unit='batch', leave=False, disable=None):
            logits = model(images.to(on))
            predictions.append(logits.topk(min(5, logits.shape[1])).indices.cpu())
            labels.append(target)
    seconds = time.perf_counter() - start

    label, num_classes = torch.cat(labels), logits.shape[1]
    check_labels(f'data={data!r}', label, num_classes)
    hit = torch.cat(predictions) == label[:, None]
    top1, top5 = hit[:, 0].double(), hit.any(1).double()
    names = class_names(model, num_classes)
    per_class = {n: float(top1[label == i].mean()) for i, n in enumerate(names) if (label == i).any()}
    return Evaluation(float(top1.mean()), float(top5.mean()), per_class, len(label), len(label) / seconds)


def is_cifar10_test(model: nn.Module, data: str) -> bool:
    """Return True if a dataset (:func:`evaluate`) has the 10,000 test images of CIFAR-10 with their classes.

    The order of the images does not matter. Classes are numbered as in the ``label_names`` of the model.
    """
    dataset = open_dataset(data, 'test')
    if len(dataset) != 10_000:
        return False
    classes, total = match_classes(model, dataset) or range(256), 0
    for i in trange(len(dataset), desc="CIFAR-10's test split?", leave=False, disable=None):
        image, label = dataset[i]
        digest = hashlib.sha256(image.tobytes() + bytes([classes[label]])).digest()
        total += int.from_bytes(digest, 'big')
    return total % 2 ** 256 == CIFAR10_TEST
