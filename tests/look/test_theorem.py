"""The page about the theorem: its numbers equal conv_to_attention in float64; its controls."""
import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from drawn import PAINTED, decode, middle, swipe, until
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.theory import conv_to_attention

pytestmark = pytest.mark.slow
DRAWN = '0.3,-1,0,2,0.25,0,0,0,-0.7'
STATES = [  # kernel, alpha, dilation, heads that are away from their taps, address
    (np.full((3, 3), 1 / 9), 0.05, 1, {}, 'size=3&kernel=blur'),
    (np.outer([1, 2, 1], [-1, 0, 1]), 3., 1, {}, 'kernel=upright'),
    (9 * np.pad([[1]], 1) - 1, 46., 2, {}, 'kernel=edges'),
    (np.array(DRAWN.split(','), float).reshape(3, 3), 1., 1, {0: (-1.5, 0.37), 8: (2.4, 1.9)},
     f'kernel={DRAWN}&moved=0:-1.5,0.37;8:2.4,1.9'),
    (np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256, 0.6, 1, {}, 'kernel=gauss&size=5'),
    (np.pad([[1]], ((4, 0), (4, 0))), 12., 3, {24: (-0.5, 0.)}, 'kernel=shift&size=5&moved=24:-0.5,0')]


def photo_of(page):
    return torch.from_numpy(decode(re.search(r'id="source" src="(.*?)"', page)[1])).permute(2, 0, 1).double() / 255


def go(page, hash):
    page.goto(f'{page.url.partition("#")[0]}#{hash}')
    page.evaluate(PAINTED)


def numbers(page, arrays, *shape):
    """Return arrays of the page, by JSON, because playwright makes an object for each number. null becomes NaN."""
    values = json.loads(page.evaluate(f'JSON.stringify({arrays}.map(array => Array.from(array)))'))
    return torch.from_numpy(np.array(values, float)).view(shape)


def around(pictures, query, radius):
    """Cut out a square around a pixel, NaN outside the picture."""
    (row, col), side = query, 2 * radius + 1
    return nn.functional.pad(pictures, (radius,) * 4, value=math.nan)[..., row:row + side, col:col + side]


assert_equal = partial(torch.testing.assert_close, atol=1e-13, rtol=0, equal_nan=True)


def layers_of(kernel, alpha, dilation, moved):
    """Return the convolution of each colour, and its conversion to attention."""
    size = len(kernel)
    conv = nn.Conv2d(3, 3, size, padding=size // 2 * dilation, dilation=dilation, groups=3, bias=False).double()
    conv.weight.copy_(torch.as_tensor(kernel))
    attention = conv_to_attention(conv, alpha)
    for head, offset in moved.items():
        attention.centers[head] += torch.tensor(offset, dtype=torch.double)
    return conv, attention


@torch.no_grad()
def test_the_page_equals_conv_to_attention(open_page):
    text = theorem_page()
    page, photo = open_page(text), photo_of(text)
    assert len(text.encode()) < 150_000
    for kernel, alpha, dilation, moved, hash in STATES:
        conv, attention = layers_of(kernel, alpha, dilation, moved)
        expected = conv(photo), attention(photo)
        go(page, f'{hash}&alpha={alpha}&dilation={dilation}')
        assert_equal(numbers(page, '[shown.convolution, shown.attention]', 2, 3, 96, 96), torch.stack(expected))
        error = float(page.locator('#error').get_attribute('value'))
        assert error == pytest.approx((expected[0] - expected[1]).abs().max().item(), abs=1e-13)
        assert page.locator('#promise').is_visible() == (not moved)
        if not moved:  # bound of the theorem plus rounding: never below the measured difference
            bound, total = float(page.locator('#bound').get_attribute('value')), np.abs(kernel).sum() * photo.max()
            limit = min(1, 4 * math.exp(-alpha)) * total
            assert error <= bound and limit <= bound <= limit + 1e-14 * total

        most, total = np.abs(kernel).sum() / 8, kernel.sum()
        black, white = sorted([0., total]) if abs(total) > 0.1 else (-most, most)
        drawn = torch.from_numpy(decode(page.evaluate('stages.attention.pixels.toDataURL()'))).permute(2, 0, 1)
        assert (drawn - 255 * ((expected[1] - black) / (white - black)).clamp(0, 1)).abs().max() <= 0.51

        query, width = [5, 90], len(kernel) // 2 * dilation  # near a corner
        factors = attention.axis_factors([96 + 2 * width] * 2)
        rows, cols = (factor[:, q] for q, factor in zip(query, factors))
        side = 2 * (width + 3) + 1
        assert_equal(
            numbers(page, f'mapsAround(photoNow(), state, {query}, {width + 3})', -1, side, side),
            around(rows[:, :, None] * cols[:, None, :], [q + width for q in query], width + 3))
        padded = nn.functional.pad(photo, (width,) * 4)
        outputs = torch.einsum('hik,ckl,hjl->hcij', factors[0], padded, factors[1])
        assert_equal(
            numbers(page, f'copiesAround(photoNow(), state, {query}, 9)', -1, 3, 19, 19), around(outputs, query, 9))

        row, col = page.evaluate('state.query')
        terms = padded[:, row:row + 2 * width + 1:dilation, col:col + 2 * width + 1:dilation].mean(0).flatten()
        for grid, values in enumerate((terms, outputs[:, :, row, col].mean(1))):
            cells = page.locator('.grid').nth(grid).locator('span').all_text_contents()
            assert [cell.split()[-1] for cell in cells] == [f'{value:.2f}' for value in values.tolist()]
            said = page.locator('#digits output').nth(grid).text_content().replace('\N{MINUS SIGN}', '-').strip('= ')
            assert float(said) == pytest.approx(expected[grid][:, row, col].mean().item(), abs=6e-5)


def drag(page, start, end):
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=8)
    page.mouse.up()


def test_heads_are_dragged_and_kernels_are_painted_typed_and_undone(open_page):
    text = theorem_page()
    page = open_page(text, viewport=dict(width=1300, height=1000))
    page.locator('#photo .stage').click()
    page.get_by_text('Pinned.').wait_for()
    heads = page.locator('#heads .stage')  # nine pixels wide, the query in the middle
    drag(page, middle(heads, 3.5 / 9, 5.5 / 9), middle(heads, 4 / 9, 7 / 9))  # head 2, up and right
    page.get_by_text('Head 2 looks 1.5').wait_for()
    assert page.evaluate('state.moved[2]') == pytest.approx([0.5, 1.5], abs=0.06)
    page.locator('.tile').nth(2).press('ArrowDown')
    for key in ('ArrowLeft', 'Shift+ArrowLeft', 'ArrowUp'):
        heads.press(key)
    assert page.evaluate('state.moved[5]') == pytest.approx([-0.1, -1.1])
    heads.press('Escape')
    assert page.evaluate('state.moved[5]') == [0, 0]

    page.get_by_text('All 0').click()
    page.locator('#pen').fill('-0.5')
    kernel = page.locator('#weights input')
    drag(page, middle(kernel.nth(0)), middle(kernel.nth(2)))
    kernel.nth(7).click()  # a click is for typing
    assert page.evaluate('state.weights') == [-0.5] * 3 + [0] * 6
    page.evaluate(PAINTED)
    page.keyboard.type('-1,25')
    assert page.evaluate('state.weights') == [-0.5] * 3 + [0, 0, 0, 0, -1.25, 0]
    page.locator('#alpha').press('End')
    page.evaluate(until('location.hash.includes("alpha=50")'))

    again = open_page(text, hash=page.evaluate('location.hash.slice(1)'))
    assert again.evaluate('[state, shown.error]') == page.evaluate('[state, shown.error]')
    for expected in ([-0.5] * 3 + [0] * 6, [0] * 9):  # one step for the typed weight, one for the stroke
        page.get_by_text('Undo').click()
        page.evaluate(until(f'String(state.weights) === "{",".join(map(str, expected))}"'))
    page.go_back()
    page.evaluate(until('state.kernel === "edges"'))
    again.get_by_text('Put all back').click()
    again.locator('[name=size]').select_option('5')
    assert again.evaluate('state.weights.filter(w => w).length') == 4 and again.evaluate('state.moved.length') == 25
    go(again, 'size=4&dilation=0&alpha=x&kernel=constructor&query=96,0&head=25&moved=25:1,1;:1,1;0:,;1:1,99')
    assert again.evaluate('[state.size, state.dilation, state.alpha, state.query, state.head]') == [
        5, 1, 50, page.evaluate('state.query'), 12]
    assert not again.evaluate('state.moved.flat().some(part => part !== 0)')


@torch.no_grad()
def test_heads_are_added_one_by_one_on_any_picture(open_page, tmp_path):
    text = theorem_page()
    page = open_page(text, reduced_motion='reduce', viewport=dict(width=1280, height=720))
    page.get_by_text('Soft to exact').click()
    assert page.evaluate('state.alpha') == 46  # no motion where less is preferred
    page.get_by_text('Equal, to the rounding').wait_for()
    box = page.locator('.tile').nth(8).bounding_box()
    assert box['y'] + box['height'] < 720  # the equation and its heads without scrolling

    go(page, 'kernel=upright&alpha=1')
    page.get_by_text('Add them one by one').click()
    page.get_by_text('Add a head').click()
    page.get_by_text('Add a head').click()  # the second weight of the row is 0, so its head is skipped
    page.get_by_text('4 of nine heads are in the sum.').wait_for()
    kernel = np.outer([1, 2, 1], [-1, 0, 1]) * (np.arange(9).reshape(3, 3) < 4)
    expected = layers_of(kernel, 1., 1, {})[1](photo_of(text))
    assert_equal(numbers(page, '[shown.attention]', 3, 96, 96), expected)
    assert page.locator('.tile.waiting').count() == 5 and not page.locator('#promise').is_visible()
    page.get_by_text('Add all').click()
    page.locator('.grid').nth(1).locator('span').nth(5).hover()
    page.locator('.lit').nth(3).wait_for()
    assert page.evaluate('[...document.querySelectorAll(".lit")].map(node => [node.tagName, node.dataset.head])') == [
        ['INPUT', '5'], ['BUTTON', '5'], ['SPAN', '5'], ['SPAN', '5']]
    before = page.evaluate('document.querySelector(".tile canvas").toDataURL()')
    page.get_by_text('Attention', exact=True).click()
    page.get_by_text('the attention map of a head').wait_for()
    assert page.evaluate('document.querySelector(".tile canvas").toDataURL()') != before
    for number, verdict in enumerate(('Equal', 'Equal', 'Equal', 'Head 2 looks 2.5')):
        page.locator('#presets button').nth(number).click()
        page.locator('#verdict', has_text=verdict).wait_for()

    Image.new('RGB', (60, 40), (255, 0, 51)).save(tmp_path / 'red.png')
    (tmp_path / 'broken.png').write_bytes(b'no picture')
    page.locator('#file').set_input_files(tmp_path / 'red.png')
    page.get_by_text('red.png; it stays on this device').wait_for()
    assert page.evaluate('[0, 9216, 18432].map(i => photoNow().values[i + 4800])') == [1, 0, 0.2]
    page.evaluate(until('shown.convolution[0] === 5'))
    page.locator('#file').set_input_files(tmp_path / 'broken.png')
    page.get_by_text('broken.png cannot be read as a picture').wait_for()


def test_a_finger_scrolls_over_the_heads_panel_and_drags_heads(open_page):
    page = open_page(theorem_page(), viewport=dict(width=390, height=844), has_touch=True, is_mobile=True)
    assert page.evaluate('document.documentElement.scrollWidth') == 390
    convolution, attention = (page.locator(f'#{name} .stage').bounding_box() for name in ('convolution', 'attention'))
    assert convolution['y'] == attention['y'] and convolution['width'] == attention['width']  # side by side
    heads = page.locator('#heads .stage')
    heads.evaluate("node => node.scrollIntoView({ block: 'center' })")
    before = page.evaluate('scrollY')
    swipe(page, *middle(heads, 0.6, 0.04), -150)
    assert page.evaluate('scrollY') > before + 50
    heads.evaluate("node => node.scrollIntoView({ block: 'center' })")
    before = page.evaluate('scrollY')
    swipe(page, *middle(heads, 3.5 / 9, 5.5 / 9), -heads.bounding_box()['height'] / 9)  # head 2, a pixel up
    assert page.evaluate('scrollY') <= before  # as the verdict grows, the page moves a little
    assert page.evaluate('state.moved[2]') == pytest.approx([-1, 0], abs=0.1)


def test_command(tmp_path, output_of, refused):
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    picture, file = tmp_path / '<b>&amp;{{data}}\udcff.png', tmp_path / 'new' / 'theorem.html'
    Image.fromarray(pixels).save(picture)
    assert str(file) in output_of('theorem', picture, '--output', file)
    page = file.read_text(encoding='utf-8')
    assert (photo_of(page) * 255).round().byte().permute(1, 2, 0).numpy().tolist() == pixels.tolist()
    assert '&lt;b&gt;&amp;amp;{{data}}?.png' in page and '<b>' not in page
    refused('theorem.html exists', ['theorem', '--output', file])
    assert file.read_text(encoding='utf-8') == page
