"""Take the chapters' pictures of both pages in Chromium.

``PYTHONPATH=.:tests python tests/look/record.py FOLDER PICTURE...``
"""
import io
import sys
from pathlib import Path

import timm
from PIL import Image
from playwright.sync_api import sync_playwright

from conftest import CHROMIUM, FLAGS
from timm_selfconv.data import open_images
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.weights import net_caption

NET = 'sa_quadratic_cifar.cifar10'
DESKTOP = dict(viewport=dict(width=1280, height=720))
PHONE = dict(viewport=dict(width=390, height=844), has_touch=True, is_mobile=True)


def shoot(page, **kwargs):
    page.evaluate('new Promise(done => setTimeout(done, 400))')
    return Image.open(io.BytesIO(page.screenshot(**kwargs))).convert('RGB')


def open_page(browser, text, device=DESKTOP):
    page = browser.new_page(**device)
    page.set_content(text)
    page.evaluate('ready')
    return page


folder, *pictures = map(Path, sys.argv[1:])
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    page, frames = open_page(browser, theorem_page()), []
    for alpha in (min(46., 0.1 * 1.5 ** frame) for frame in range(17)):
        page.evaluate('alpha => { location.hash = `alpha=${alpha}`; }', alpha)
        frames.append(shoot(page).resize((960, 540), Image.Resampling.LANCZOS).quantize(96))
    frames[0].save(folder / 'theorem.gif', save_all=True, append_images=frames[1:], loop=0,
                   duration=[900] + [160] * (len(frames) - 2) + [3000])
    page.locator('#presets button').nth(3).click()
    shoot(page, full_page=True).save(folder / 'theorem.png', optimize=True)

    images = dict(zip([path.name for path in pictures], open_images(pictures)))
    text = explorer_page(timm.create_model(NET, pretrained=True), images, NET, net_caption(NET), NET)
    view = 'image=1&at=0.45,0.6'
    for name, device, hash in (('explorer', DESKTOP, f'{view}&head=1.2'), ('explorer-phone', PHONE, view)):
        page = open_page(browser, text, device)
        page.evaluate('hash => { location.hash = hash; dispatchEvent(new Event("hashchange")); }', hash)
        shoot(page, full_page=device is DESKTOP).save(folder / f'{name}.png', optimize=True)
