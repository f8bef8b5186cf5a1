"""Folders of pictures with one folder per class."""
import numpy as np
from PIL import Image


def fill(folder, names, count=1, size=(32, 32), seed=0, suffix='.png'):
    """Make a folder for each name with pictures of noise (0.png, ...), and return the parent folder."""
    rng = np.random.default_rng(seed)
    for name in map(str, names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name / f'{i}{suffix}')
    return folder


def fill_splits(folder, *names, size=(32, 32)):
    """Fill a folder in the layout of timm's image folders, with 12 training and 3 test pictures per class."""
    for split, count in (('train', 12), ('test', 3)):
        fill(folder / split, names, count, size, seed=count)
    return folder
