"""Take the chapters' pictures of both pages in Chromium.

``PYTHONPATH=.:tests python tests/look/record.py FOLDER PICTURE...``

The theorem becomes an animation from soft to exact and a picture. The explorer of a full-size net and the given
pictures becomes two pictures, one of them on a phone.
"""
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import timm
from PIL import Image
from playwright.sync_api import sync_playwright

from conftest import CHROMIUM, FLAGS
from timm_selfconv.data import open_images
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.weights import net_caption

NET = 'sa_quadratic_cifar.cifar10'
ALPHAS = [min(46., 0.1 * 1.5 ** frame) for frame in range(17)]
DESKTOP: Any = dict(viewport=dict(width=1280, height=720))
PHONE: Any = dict(viewport=dict(width=390, height=844), has_touch=True, is_mobile=True)


def shoot(page: Any, **kwargs: Any) -> Image.Image:
    page.evaluate('new Promise(done => setTimeout(done, 400))')
    return Image.open(io.BytesIO(page.screenshot(**kwargs))).convert('RGB')


def record(browser: Any, file: Path, folder: Path, *pictures: Path) -> None:
    def open_page(text: str, hash: str = '', device: Any = DESKTOP) -> Any:
        file.write_text(text)
        page = browser.new_page(**device)
        page.goto(f'{file.as_uri()}#{hash}')
        page.evaluate('ready')
        return page

    page, frames = open_page(theorem_page()), []
    for alpha in ALPHAS:
        page.evaluate('alpha => { location.hash = `alpha=${alpha}`; }', alpha)
        frames.append(shoot(page).resize((960, 540), Image.Resampling.LANCZOS).quantize(96))
    frames[0].save(folder / 'theorem.gif', save_all=True, append_images=frames[1:], loop=0,
                   duration=[900] + [160] * (len(frames) - 2) + [3000])
    page.locator('#presets button').nth(3).click()
    shoot(page, full_page=True).save(folder / 'theorem.png', optimize=True)

    images = dict(zip([path.name for path in pictures], open_images(pictures)))
    text, view = explorer_page(timm.create_model(NET, True), images, NET, net_caption(NET), NET), 'image=1&at=0.45,0.6'
    shoot(open_page(text, f'{view}&head=1.2'), full_page=True).save(folder / 'explorer.png', optimize=True)
    shoot(open_page(text, view, PHONE)).save(folder / 'explorer-phone.png', optimize=True)


with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
    record(playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS), Path(temporary, 'page.html'),
           *map(Path, sys.argv[1:]))
