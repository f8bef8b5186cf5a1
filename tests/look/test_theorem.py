"""The theorem's page: what it shows is what conv_to_attention computes, in float64."""
import base64
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from drawn import PAINTED, until
from timm_selfconv import cli
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.theory import conv_to_attention

pytestmark = pytest.mark.slow
GO = f"""async hash => {{
    if (location.hash !== '#' + hash) await new Promise(done => {{
        addEventListener('hashchange', done, {{ once: true }});
        location.hash = hash;
    }});
    await ({PAINTED})();
}}"""
DRAWN = '0.3,-1,0,2,0.25,0,0,0,-0.7'
STATES = {  # kernel, alpha, dilation, heads that are off their taps
    'size=3&dilation=1&kernel=blur&alpha=0.05': (np.full((3, 3), 1 / 9), 0.05, 1, {}),
    'kernel=upright&alpha=3': (np.outer([1, 2, 1], [-1, 0, 1]), 3., 1, {}),
    'kernel=edges&alpha=46&dilation=2': (9 * np.pad([[1]], 1) - 1, 46., 2, {}),
    f'dilation=1&kernel={DRAWN}&alpha=1&moved=1:-1.5,0.37;9:2.4,1.9': (
        np.array(DRAWN.split(','), float).reshape(3, 3), 1., 1, {0: (-1.5, 0.37), 8: (2.4, 1.9)}),
    'kernel=gauss&size=5&alpha=0.6': (np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256, 0.6, 1, {}),
    'kernel=shift&size=5&dilation=3&alpha=12&moved=25:-0.5,0': (
        np.pad([[1]], ((4, 0), (4, 0))), 12., 3, {24: (-0.5, 0.)}),
}


def photo_of(page):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    pixels = np.frombuffer(base64.b64decode(data['pixels']), np.uint8).reshape(data['size'], data['size'], 3)
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).double() / 255


def evaluate(page, expression):
    """Its value by way of JSON: of long arrays playwright makes an object per number."""
    return json.loads(page.evaluate(f'JSON.stringify({expression})'))


def layers_of(kernel, alpha, dilation, moved):
    """The convolution of each colour, and the attention that it is."""
    size = len(kernel)
    conv = nn.Conv2d(
        3, 3, size, padding=dilation * (size - 1) // 2, dilation=dilation, groups=3, bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(torch.as_tensor(kernel))
        attention = conv_to_attention(conv, alpha)
        for head, offset in moved.items():
            attention.centers[head] += torch.tensor(offset, dtype=torch.double)
    return conv, attention


@torch.no_grad()
def test_both_pictures_and_their_difference_are_those_of_conv_to_attention(open_page):
    text = theorem_page()
    page, photo = open_page(text), photo_of(text)
    for hash, (kernel, alpha, dilation, moved) in STATES.items():
        conv, attention = layers_of(kernel, alpha, dilation, moved)
        expected = conv(photo), attention(photo)
        page.evaluate(GO, hash)
        shown = evaluate(page, '[shown.convolution, shown.attention].map(values => Array.from(values))')
        for values, picture in zip(shown, expected):
            torch.testing.assert_close(
                torch.tensor(values, dtype=torch.double).view(3, 96, 96), picture, atol=1e-13, rtol=0)
        error = (expected[0] - expected[1]).abs().max().item()
        printed = page.locator('#error')
        assert float(printed.get_attribute('value')) == pytest.approx(error, rel=1e-9, abs=1e-13)
        if error > 1e-3:
            assert float(printed.text_content()) == pytest.approx(error, rel=5e-3)
        assert page.locator('#promise').is_hidden() == bool(moved)
        if not moved:  # the docstring's 2 K exp(-alpha) of the largest pixel, of each weight
            bound = min(1, 4 * math.exp(-alpha)) * np.abs(kernel).sum() * photo.max().item()
            assert float(page.locator('#bound').get_attribute('value')) == pytest.approx(bound, rel=1e-12)
            assert error <= bound + 1e-14

        total = kernel.sum()
        black, white = (min(0., total), max(0., total)) if abs(total) > 0.1 else (
            -np.abs(kernel).sum() / 8, np.abs(kernel).sum() / 8)
        png = base64.b64decode(page.evaluate('stages.attention.pixels.toDataURL().split(",")[1]'))
        drawn = torch.from_numpy(np.array(Image.open(io.BytesIO(png)).convert('RGB'))).permute(2, 0, 1)
        assert (drawn - 255 * ((expected[1] - black) / (white - black)).clamp(0, 1)).abs().max() <= 0.51

        query = [5, 90]  # near a corner: maps end where the padded picture does
        width = len(kernel) // 2 * dilation
        rows, cols = (factor[:, q] for q, factor in zip(query, attention.axis_factors([96 + 2 * width] * 2)))
        side = 2 * (width + 3) + 1
        maps = evaluate(page, f'mapsAround(photo, state, {query}, {width + 3}).map(map => Array.from(map))')
        maps = torch.from_numpy(np.array(maps, float)).view(-1, side, side)  # null, JSON's NaN, becomes NaN
        top, left = (q - 3 for q in query)  # of the window, in the padded picture
        whole = torch.full((len(maps), 96 + 2 * width + 6, 96 + 2 * width + 6), math.nan).double()
        whole[:, 3:-3, 3:-3] = rows[:, :, None] * cols[:, None, :]
        torch.testing.assert_close(
            maps, whole[:, top + 3:top + 3 + side, left + 3:left + 3 + side], atol=1e-13, rtol=0, equal_nan=True)


def test_pointer_keys_pen_and_link(open_page):
    text = theorem_page()
    page = open_page(text, viewport=dict(width=1300, height=1000))
    box = page.locator('#photo .stage').bounding_box()
    page.mouse.move(box['x'] + box['width'] * 20.5 / 96, box['y'] + box['height'] * 70.5 / 96)
    page.locator('#photo .stage').focus()
    page.keyboard.press('ArrowUp')
    assert page.evaluate('state.query') == [69, 20]

    box = page.locator('#heads .stage').bounding_box()
    pixel = box['width'] / 9  # four on either side of the query
    x, y = box['x'] + 5.5 * pixel, box['y'] + 3.5 * pixel  # head 3, up and right
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 1.5 * pixel, y + pixel / 2, steps=3)
    page.mouse.up()
    assert page.evaluate('state.head') == 2
    assert page.evaluate('state.moved[2]') == pytest.approx([0.5, 1.5], abs=0.06)
    assert 'Head 3 is 1.5' in page.locator('#verdict').text_content()
    page.locator('.tile').nth(2).press('ArrowDown')
    page.locator('#heads .stage').focus()
    for key in ('ArrowLeft', 'Shift+ArrowLeft', 'ArrowUp'):
        page.keyboard.press(key)
    assert page.evaluate('state.moved[5]') == pytest.approx([-0.1, -1.1])
    page.keyboard.press('Escape')
    assert page.evaluate('state.moved[5]') == [0, 0]

    page.get_by_text('All 0').click()
    page.locator('#pen').fill('-0.5')
    cells = page.locator('#weights input').all()
    places = [cell.bounding_box() for cell in cells]
    middles = [(place['x'] + place['width'] / 2, place['y'] + place['height'] / 2) for place in places]
    page.mouse.move(*middles[0])
    page.mouse.down()
    page.mouse.move(*middles[2], steps=8)
    page.mouse.up()
    cells[7].focus()
    page.keyboard.type('-1,25')
    assert page.evaluate('state.weights') == [-0.5, -0.5, -0.5, 0, 0, 0, 0, -1.25, 0]
    page.locator('#alpha').focus()
    page.keyboard.press('End')
    page.evaluate(until('location.hash.includes("alpha=50")'))

    link = page.evaluate('location.hash.slice(1)')
    again = open_page(text, hash=link)
    assert again.evaluate('state') == page.evaluate('state')
    assert again.evaluate('[shown.error, state.alpha]') == [page.evaluate('shown.error'), 50]
    again.get_by_text('Put all back').click()
    again.locator('[name=size][value="5"]').check(force=True)
    assert again.evaluate('state.weights.filter(w => w).length') == 4 and again.evaluate('state.moved.length') == 25
    again.evaluate(GO, 'size=4&dilation=0&alpha=x&kernel=constructor&query=96,0&head=26&moved=26:1,1;1:,;2:1,99')
    assert again.evaluate('[state.size, state.dilation, state.alpha, state.query, state.head]') == [
        5, 1, 50, [69, 20], 12]
    assert not again.evaluate('state.moved.flat().some(part => part !== 0)')


@pytest.mark.parametrize('scheme,width', [('light', 1300), ('dark', 390)])
def test_screen(scheme, width, open_page):
    page = open_page(theorem_page(), color_scheme=scheme, reduced_motion='reduce',
                     viewport=dict(width=width, height=800))
    assert page.evaluate('document.documentElement.scrollWidth') == width
    page.get_by_text('Soft to exact').click()
    assert page.evaluate('state.alpha') == 46  # no motion where less is preferred
    page.get_by_text('Equal, to the rounding').wait_for()
    background = page.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (int(re.findall(r'\d+', background)[0]) > 200) == (scheme == 'light')


def test_command(tmp_path, capsys, refused):
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    picture, file = tmp_path / '<b>&amp;{{data}}.png', tmp_path / 'new' / 'theorem.html'
    Image.fromarray(pixels).save(picture)
    cli.main(['theorem', str(picture), '--output', str(file)])
    page = file.read_text(encoding='utf-8')
    assert str(file) in capsys.readouterr().out
    assert (photo_of(page) * 255).round().byte().permute(1, 2, 0).numpy().tolist() == pixels.tolist()
    assert '&lt;b&gt;&amp;amp;{{data}}.png' in page and '<b>' not in page
    refused('theorem.html exists', ['theorem', '--output', file])
    assert file.read_text(encoding='utf-8') == page
