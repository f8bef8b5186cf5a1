"""Folders of pictures, a folder a class."""
import numpy as np
from PIL import Image


def fill(folder, names, count=1, size=(32, 32), seed=0):
    """Make a folder for each name with so many pictures of noise, 0.png and so on; returns the folder of all."""
    rng = np.random.default_rng(seed)
    for name in map(str, names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name / f'{i}.png')
    return folder


def fill_splits(folder, *names, size=(32, 32)):
    """Fill a folder as timm's image folders are: of each class 12 pictures to train on and 3 to test."""
    for split, count in (('train', 12), ('test', 3)):
        fill(folder / split, names, count, size, seed=count)
    return folder
