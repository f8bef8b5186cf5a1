"""The theorem, live: one page on which a convolution and the attention heads that are it work side by side.

The page computes both itself, in float64, as :func:`timm_selfconv.theory.conv_to_attention` does: this module gives it
a photograph.
"""
import base64
import html
import json
from typing import Optional

import timm_selfconv
from PIL import Image, ImageOps

from timm_selfconv.data import open_images
from .explorer import PAGE, fill_page

__all__ = ['theorem_page']

SIDE = 96  # at which a 5 x 5 kernel's heads follow a finger
CREDIT = 'The photograph of Chelsea is by Stéfan van der Walt (CC0).'


def theorem_page(image: Optional[Image.Image] = None, name: str = '') -> str:
    """The page of Theorem 1, that needs nothing else.

    Args:
        image: A picture to convolve, of which the middle is taken; by default a cat.
        name: What the page calls the picture.

    Returns:
        HTML.
    """
    credit = f'The photograph is {name}.' if name else CREDIT if image is None else ''
    photo = ImageOps.fit(open_images([PAGE / 'photo.png'])[0] if image is None else image, (SIDE, SIDE))
    data = dict(size=SIDE, pixels=base64.b64encode(photo.convert('RGB').tobytes()).decode())
    return fill_page(
        'theorem.html', data=json.dumps(data), version=timm_selfconv.__version__, credit=html.escape(credit))
