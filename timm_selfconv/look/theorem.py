"""A page about Theorem 1: a convolution and the equal sum of attention heads.

The page computes both in float64, as :func:`timm_selfconv.theory.conv_to_attention` does. This module inserts the
photograph.
"""
import html
from typing import Optional

import timm_selfconv
from PIL import Image, ImageFilter, ImageOps

from timm_selfconv.data import open_images
from .explorer import PAGE, fill_page, image_uri

__all__ = ['theorem_page']

SIDE = 96  # small enough to follow a finger with 25 heads
CREDIT = 'The photograph of Chelsea is by Stéfan van der Walt (CC0).'
EDGES = ImageFilter.Kernel((3, 3), [-1, -1, -1, -1, 8, -1, -1, -1, -1], 4, 128)  # for readers without JavaScript


def theorem_page(image: Optional[Image.Image] = None, name: str = '') -> str:
    """The page of Theorem 1, a single file that works offline.

    Args:
        image: A picture to convolve; the page takes its middle. By default a cat.
        name: Name of the picture on the page.

    Returns:
        HTML.
    """
    credit = f'The photograph is {name}.' if name else CREDIT if image is None else ''
    photo = ImageOps.fit(open_images([PAGE / 'photo.png'])[0] if image is None else image, (SIDE, SIDE)).convert('RGB')
    return fill_page(
        'theorem.html', photo=image_uri(photo), edges=image_uri(photo.convert('L').filter(EDGES)),
        version=timm_selfconv.__version__, credit=html.escape(credit))
