"""The explorer's page and its controls, in a real browser."""
import io
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from drawn import PAINTED, heads_of, until
from explored import PICTURES, create, picture
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.theory import position_blobs
from timm_selfconv.weights.history import write_history

pytestmark = pytest.mark.slow


def test_pointer_keys_clicks_and_permalink(open_page):
    text = explorer_page({'first': create('sa_learned_cifar'), 'second': create('sa_learned_content_cifar')}, PICTURES)
    page = open_page(text)
    stage = page.locator('.stage').first
    box = stage.bounding_box()
    page.mouse.move(box['x'] + box['width'] * 4.5 / 12, box['y'] + box['height'] * 2.5 / 8)
    query = 'panels.map(({ net }) => net.query())'
    assert page.evaluate(query) == [2 * 12 + 4] * 2
    stage.focus()
    for key in ('ArrowDown', 'ArrowRight', 'ArrowRight', 'ArrowUp', 'ArrowLeft', 'ArrowUp'):
        page.keyboard.press(key)
    assert page.evaluate(query) == [1 * 12 + 5] * 2
    page.get_by_label('Layer 1, head 2').nth(1).click()
    page.get_by_label('picture 1', exact=True).check(force=True)
    page.get_by_text('Content only', exact=True).click()
    page.get_by_label('Average over the pictures').check()
    page.get_by_label('Sort by distance').check()
    page.evaluate(until('location.hash.includes("sort=1")'))
    page.get_by_text('Per-tile scale').click()
    page.evaluate(until('!location.hash.includes("scale=all")'))
    assert 'row 1, column 5' in page.locator('output').nth(1).text_content()
    assert 'Layer 1, head 2' in page.locator('output').nth(1).text_content()
    order = '[...document.querySelectorAll(".heads")].map(e => e.textContent)'
    shown = page.evaluate('panels.map(({ net }) => Array.from(net.shown))')
    link, sorted_heads = page.evaluate('location.hash.slice(1)'), page.evaluate(order)

    again = open_page(text, hash=link)
    assert again.evaluate('state') == {
        **page.evaluate('state'), 'at': pytest.approx(page.evaluate('state.at'), abs=1e-4)}
    assert again.evaluate(order) == sorted_heads
    assert again.evaluate('panels.map(({ net }) => Array.from(net.shown))') == shown
    assert again.evaluate('panels[1].tiles[5].button.getAttribute("aria-pressed")') == 'true'
    again.keyboard.press('Escape')
    assert again.evaluate('state.heads') == [None, None]


def test_a_link_of_nonsense_changes_nothing(open_page):
    page = open_page(explorer_page({'net': create('sa_learned_cifar')}, PICTURES),
                     hash='image=7&at=2,x&view=nothing&heads=9.9&sort=&epoch=3')
    assert page.evaluate('state') == dict(
        image=0, at=[0.5, 0.5], view='all', scale='all', mean=False, sort=False, token=False, heads=[None],
        epoch=None)


COLOURS = """() => { const { image, width, height } = panels[0].atlases[0];
    const data = i => Array.from(image.data.slice(4 * i * width * height, 4 * i * width * height + 4));
    return panels[0].tiles.map((_, i) => data(i)); }"""


def sharp_and_flat():
    """A net of two heads: one looks at the query only, the other everywhere alike."""
    model = create('sa_quadratic_cifar', depth=1, num_heads=2)
    with torch.no_grad():
        model.blocks[0].attn.encoding.centers.zero_()
        model.blocks[0].attn.encoding.spreads.copy_(torch.tensor([9., 0.]))
    return model


def test_one_scale_for_all_tiles_or_one_for_each(open_page):
    """A head that looks everywhere alike is dark beside a sharp one, and as bright as it gets by itself."""
    page = open_page(explorer_page({'net': sharp_and_flat()}, PICTURES), hash='at=0,0&scale=all')
    yellow = [0xfd, 0xe7, 0x25, 255]
    sharp, flat = page.evaluate(COLOURS)
    assert sharp == yellow
    place = 8 * (1 / 96) ** 0.5  # of nine colours; a root makes 1 / 96 of the largest a tenth
    low, high = (0x44, 0x01, 0x54), (0x47, 0x2d, 0x7b)
    assert flat[:3] == pytest.approx([a + (b - a) * place for a, b in zip(low, high)], abs=2)
    assert page.locator('.scale span').all_text_contents() == ['0', '0.25', '1']
    page.get_by_text('Per-tile scale').click()
    page.evaluate(PAINTED)
    assert page.evaluate(COLOURS) == [yellow, yellow]


def test_the_most_probable_classes_and_the_true_one(open_page):
    model = create('sa_learned_cifar')
    with torch.no_grad():
        model.head.fc.weight.zero_()
        model.head.fc.bias.copy_(torch.tensor([0., 3., 1., 2., *[-1.] * 6]))
    pictures = {**PICTURES, 'picture 2': picture(2)}
    page = open_page(explorer_page(
        {'net': model}, pictures, labels=['cat', 'truck', 'unicorn'], captions=['trained by nobody']))
    probs = model.head.fc.bias.detach().softmax(0).tolist()
    expected = [f'{name}{100 * probs[i]:.1f} %' for i, name in ((1, 'automobile'), (3, 'cattrue'), (2, 'bird'))]
    assert page.locator('.classes li').all_text_contents() == expected
    page.get_by_label('picture 1', exact=True).check(force=True)
    assert page.locator('.classes li').all_text_contents()[1:] == [
        expected[1].replace('true', ''), expected[2], f'trucktrue{100 * probs[9]:.1f} %']
    page.get_by_label('picture 2', exact=True).check(force=True)  # a class that the net does not know has no bar
    assert page.locator('.classes li').last.text_content() == 'unicorntrue'
    assert page.locator('.classes li').count() == 4 and page.locator('.classes li > div').count() == 3
    assert page.locator('.about p').text_content() == 'trained by nobody'
    for wrong in (dict(labels=['cat']), dict(captions=['a', 'b'])):
        with pytest.raises(ValueError, match='needs none, or one for each of'):
            explorer_page({'net': model}, PICTURES, **wrong)


def test_a_picture_shows_what_no_frame_has_drawn_yet(open_page):
    """A layout that moved clears the canvases until the next frame."""
    page = open_page(explorer_page({'net': create('sa_quadratic_cifar')}, PICTURES))
    drawn, cleared = page.evaluate('[paint().toDataURL(), (panels[0].fit(), paint().toDataURL())]')
    assert cleared == drawn


def test_link_and_picture_of_the_view(open_page):
    page = open_page(explorer_page({'net': create('sa_quadratic_cifar')}, PICTURES), hash='heads=1.2&at=0.3,0.3',
                     permissions=['clipboard-read', 'clipboard-write'])
    page.get_by_text('Copy link').click()
    page.get_by_text('Copied', exact=True).wait_for()
    link = page.evaluate('navigator.clipboard.readText()')  # an address on this device is of no use to others
    assert link.startswith('#image=0') and 'heads=1.2' in link and 'at=0.3000%2C0.3000' in link
    assert 'only the view was copied' in page.locator('#status').text_content()
    with page.expect_download() as download:
        page.get_by_text('Save PNG').click()
    assert download.value.suggested_filename == 'attention.png'
    saved = Image.open(download.value.path()).convert('RGB')
    page.evaluate('document.getElementById("view").classList.add("still")')  # as it was painted, title and scale too
    view = page.locator('#view').bounding_box()
    assert page.locator('#mode').text_content() == 'picture 0, shared scale'
    assert saved.size == pytest.approx((2 * view['width'] + 64, 2 * view['height'] + 64), abs=2)
    for place in page.locator('#caption strong, #mode, .scale canvas, .tile div').all():  # in place, and no flat patch
        box = place.bounding_box()
        left, top = 2 * (box['x'] - view['x']) + 32, 2 * (box['y'] - view['y']) + 32
        assert len(saved.crop((left, top, left + 2 * box['width'], top + 2 * box['height'])).getcolors(1 << 16)) > 3


def test_the_picture_of_a_view_has_its_words_but_no_controls(open_page, tmp_path):
    model = create('sa_quadratic_cifar')
    write_run(tmp_path, model, (8, 12), 1)
    page = open_page(explorer_page({'net': model}, PICTURES, runs=[tmp_path]))
    lines = page.evaluate("""() => {
        const lines = [], Context = CanvasRenderingContext2D.prototype, plain = Context.fillText;
        Context.fillText = text => lines.push(text);
        paint();
        Context.fillText = plain;
        return lines;
    }""")
    assert 'Play' not in lines and 'Training: where the heads look' in lines
    assert not any(re.search(r'\s\s', line) for line in lines)  # folded, as on the page


def test_averages_show_no_single_pictures_classes(open_page):
    page = open_page(explorer_page({'net': create('sa_learned_content_cifar')}, PICTURES), hash='mean=1')
    page.get_by_text('Mean over 2 pictures').wait_for()
    assert not page.locator('.classes').is_visible()
    shown = page.evaluate("""async () => {
        const image = document.querySelector('.stage img'), canvas = document.createElement('canvas');
        await image.decode();
        [canvas.width, canvas.height] = [24, 16];
        canvas.getContext('2d').drawImage(image, 0, 0);
        return Array.from(canvas.getContext('2d').getImageData(0, 0, 24, 16).data);
    }""")
    expected = np.mean([np.asarray(image, float) for image in PICTURES.values()], axis=0)
    np.testing.assert_allclose(np.reshape(shown, (16, 24, 4))[..., :3], expected, atol=1)
    page.get_by_label('Average over the pictures').uncheck()
    assert page.locator('.classes').is_visible()


def test_wide_heads_show_over_the_picture(open_page):
    """A head that looks everywhere alike, dark in its tile beside a sharp one, takes its own scale over the picture."""
    page = open_page(explorer_page({'net': sharp_and_flat()}, PICTURES), hash='heads=0.1')
    page.get_by_text('scaled to its own largest value').wait_for()
    pixels = page.evaluate('Array.from(panels[0].covers[0].image.data)')
    assert [pixels[i::4][0] for i in range(3)] == [0xfd, 0xe7, 0x25] and 100 < pixels[3] < 230


def write_run(folder, model, grid, epochs):
    """A run in which a net's centres go one pixel down and its spreads shrink with each epoch."""
    rows = []
    for epoch in range(epochs + 1):
        rows.append(dict(epochs=epoch, heads=heads_of(model, grid), eval_top1=90. if epoch == epochs else None))
        if epoch:
            rows[-1]['train_loss'] = 9 / epoch
        with torch.no_grad():
            for block in model.blocks:
                block.attn.encoding.centers[:, 0] += 1
    write_history(folder / 'history.json', 'net', list(grid), rows)


ELLIPSES = """epoch => {
    const calls = [], Context = CanvasRenderingContext2D.prototype, plain = Context.ellipse;
    Context.ellipse = function (...args) { calls.push(args); };
    Object.assign(state, { epoch });
    panels[0].film.draw();
    Context.ellipse = plain;
    const { canvas } = panels[0].film.screens[0], unit = canvas.width / 14;
    return calls.map(([x, y, a, b, angle]) => [y / unit - 5.5, x / unit - 7.5, a / unit, b / unit, angle]);
}"""


def test_the_film_shows_where_the_heads_were_after_each_epoch(open_page, tmp_path):
    model = create('sa_quadratic_gen_cifar')
    write_run(tmp_path, model, (8, 12), 90)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.encoding.centers[:, 0] -= 91  # back to the start
    blobs = position_blobs(model, (8, 12))
    page = open_page(explorer_page({'net': model}, PICTURES, runs=[tmp_path]), hash='epoch=1', reduced_motion='reduce')
    words, slider = page.locator('.film header p'), page.locator('.film input')
    assert words.text_content() == 'after epoch 1 of 90, training loss 9.00' and slider.input_value() == '1'
    for epoch in (0, 0.5, 2, 90):
        drawn = page.evaluate(ELLIPSES, epoch)
        expected = [(c, cov) for b in blobs for c, cov in zip(b.centers, b.covariances)]
        for (row, col, long, short, angle), (center, covariance) in zip(drawn, expected, strict=True):
            assert (row, col) == pytest.approx((center[0].item() + epoch, center[1].item()), abs=1e-3)
            axes = torch.tensor([[math.sin(angle), math.cos(angle)], [math.cos(angle), -math.sin(angle)]]).double()
            spread = axes.T @ torch.diag(torch.tensor([long, short]).double() ** 2 / (2 * math.log(2))) @ axes
            torch.testing.assert_close(spread, covariance, rtol=1e-3, atol=1e-4)

    slider.focus()
    page.keyboard.press('ArrowLeft')
    assert page.evaluate('state.epoch') == 89
    page.keyboard.press('Home')
    page.get_by_text('untrained, before 90 epochs').wait_for()
    page.keyboard.press('Space')
    page.evaluate(until('state.epoch > 0'))
    assert page.evaluate('Number.isInteger(state.epoch)')  # where less motion is preferred
    page.get_by_text('Pause').click()
    page.get_by_text('Play').wait_for()
    assert page.evaluate('[player, state.epoch < 90]') == [0, True]
    slider.press('End')
    page.get_by_text('after epoch 90 of 90, training loss 0.10, 90.0 % of the validation images right').wait_for()
    page.evaluate(until('location.hash.includes("epoch=90")'))


def test_the_film_of_another_net_is_refused(tmp_path):
    write_run(tmp_path, create('sa_quadratic_cifar', num_heads=2), (8, 12), 1)
    with pytest.raises(ValueError, match='is of a net with other heads or another grid'):
        explorer_page({'net': create('sa_quadratic_cifar')}, PICTURES, runs=[tmp_path])
    page = explorer_page({'net': create('sa_quadratic_cifar')}, PICTURES, runs=['resnet_tiny_cifar'])
    assert '"film": null' in page  # none ships


AT_REST = """() => new Promise(done => {
    let last = NaN, alike = 0;
    const look = () => {
        [alike, last] = [scrollY === last ? alike + 1 : 0, scrollY];
        if (alike < 10) requestAnimationFrame(look); else done();
    };
    look();
})"""


def test_a_phone_keeps_picture_and_maps_in_sight(open_page):
    """390 pixels wide: maps above the fold, the picture sticks small at the top, a finger on the maps scrolls."""
    page = open_page(explorer_page({'net': create('sa_quadratic_cifar', depth=6, num_heads=9)}, PICTURES),
                     viewport=dict(width=390, height=700), has_touch=True, is_mobile=True)
    finger = page.context.new_cdp_session(page)

    def swipe(x, y, dy):
        finger.send('Input.dispatchTouchEvent', dict(type='touchStart', touchPoints=[dict(x=x, y=y)]))
        for i in range(1, 11):
            finger.send('Input.dispatchTouchEvent', dict(type='touchMove', touchPoints=[dict(x=x, y=y + dy * i / 10)]))
        finger.send('Input.dispatchTouchEvent', dict(type='touchEnd', touchPoints=[]))
        page.evaluate(AT_REST)

    stage, tile = page.locator('.stage'), page.locator('.tile div')
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
    assert tile.nth(5).bounding_box()['y'] < 700  # the whole first layer
    box = tile.nth(5).bounding_box()
    swipe(box['x'], box['y'], -280)
    scrolled = page.evaluate('scrollY')
    assert scrolled > 100
    box = stage.bounding_box()
    assert 0 <= box['y'] < 20 and box['y'] + box['height'] < 300
    before = page.evaluate('state.at')
    swipe(box['x'] + 20, box['y'] + 20, 80)
    assert page.evaluate('scrollY') == scrolled and page.evaluate('state.at[0]') > before[0] + 0.1


@pytest.mark.parametrize('scheme,width', [('light', 1300), ('dark', 390)])
def test_screen(scheme, width, open_page):
    nets = {'first': create('sa_quadratic_cifar', num_heads=16), 'a_rather_long_name_' * 4: create('sa_learned_cifar')}
    page = open_page(explorer_page(nets, PICTURES), color_scheme=scheme, viewport=dict(width=width, height=800))
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert('RGB')
    assert shot.width == width
    assert (shot.getpixel((1, 1))[0] > 200) == (scheme == 'light')
    assert page.locator('.tile div').count() == 2 * 16 + 2 * 3
    assert any(colour == (0xfd, 0xe7, 0x25) for _, colour in shot.getcolors(1 << 24))  # the scale's last


def test_what_the_user_names_is_text(open_page):
    evil = '</script><script>document.title = "caught"</script><img src=x onerror=alert(1)>{{data}}&amp;\u2028'
    page = open_page(explorer_page({evil: create('sa_learned_cifar')}, {evil: picture(0)}))
    assert page.title() == f'Attention explorer: {evil}'.replace('\u2028', ' ') or evil in page.title()
    assert page.locator('h2').text_content() == evil
    assert page.locator('#pictures input').get_attribute('aria-label') == evil
    assert page.locator('script').count() == 2 and page.locator('img[src=x]').count() == 0
