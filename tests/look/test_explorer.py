"""The explorer in a real browser: its data against the nets' own maps, and its controls."""
import io
import math
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from drawn import decode, middle, set_heads, swipe, until, write_run
from timm_selfconv.data import preprocess
from timm_selfconv.look.attention_maps import attention_maps, class_attention, footprint_weights
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.look.theorem import theorem_page
from timm_selfconv.theory import convs_to_attention, position_blobs
from tiny_nets import randomised

pytestmark = pytest.mark.slow
ALL_TERMS = ('content', 'content_position', 'key_bias', 'position')
SMALL, VIT = dict(embed_dim=16, mlp_dim=8, depth=2, num_heads=3), dict(embed_dim=24, depth=2, num_heads=3)
SWIN, SAN = dict(embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=4), dict(channels=(32, 32), depths=(1, 1))
SHOWN = """async ([change, query]) => {
    Object.assign(state, change);
    await net.load();
    net.show(query);
    return net.heads.map((_, i) => Array.from(net.head(i)));
}"""  # maps of all heads in a state of the explorer


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8))


PICTURES = {f'picture {i}': picture(i) for i in range(2)}


def create(name, size=None, **kwargs):
    """Make a small net with peaked maps. SAN keeps its first weights, because random ones make its maps flat."""
    own, vector = name.startswith(('sa_', 'resvit_')), name.startswith('san_')
    size = size or ((16, 24) if own or vector else (48, 80))
    model = timm.create_model(name, **{**(SMALL if own else {}), **kwargs}, img_size=size).eval()
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, *size), crop_pct=1.)
    return model if vector else randomised(model, seed=4)


@pytest.mark.parametrize('name,kwargs,finest', [
    ('sa_quadratic_gen_cifar', {}, (8, 12)),
    ('sa_learned_cifar', {}, (8, 12)),
    ('sa_learned_content_cifar', {}, (8, 12)),
    ('sa_quadratic_gen_cifar', dict(terms=ALL_TERMS), (8, 12)),
    ('sa_quadratic_cifar', dict(terms=('content',), encoding='sinusoid'), (8, 12)),
    ('resvit_cifar', {}, (8, 12)),
    ('san_pairwise_cifar', SAN, (8, 12)),
    ('san_patchwise_hier_cifar', SAN, (16, 24)),
    ('swin_tiny_patch4_window7_224', SWIN, (12, 20)),
    ('resnet_tiny_cifar', dict(channels=(4,) * 4, layers=(1,) * 4), (24, 40))])
def test_the_page_has_the_maps_of_the_net(name, kwargs, finest, open_page):
    """On a coarser layer, the query is at the same place of the picture."""
    model, vector = create(name, **kwargs), name.startswith('san')
    if name.startswith('resnet'):
        model, _ = convs_to_attention(model, ['layer3', 'layer4'], alpha=3.)
    text, batch = explorer_page(model, PICTURES), preprocess(model, list(PICTURES.values()))
    page, step = open_page(text), 1e-4 if '"tables"' in text else 1 / 100
    maps = (footprint_weights if vector else attention_maps)(model, batch)
    height, width = page.evaluate('net.grid')
    assert (height, width) == finest
    for query in (0, width - 1, height // 2 * width + width // 3, height * width - 1):
        shown = [page.evaluate(SHOWN, [dict(image=i % 2, mean=i == 2), query]) for i in range(3)]
        for layer in maps:
            row, col = query // width * layer.shape[2] // height, query % width * layer.shape[3] // width
            each = layer[:, :, row, col].double()
            limit = (layer.abs().max() / 253).expand_as(each) if vector else each.amax((-2, -1), keepdim=True) * step
            expected, limit = (torch.cat([x, x.mean(0, keepdim=True)]) for x in (each, limit))
            values = torch.tensor([[heads.pop(0) for _ in each[0]] for heads in shown]).view(expected.shape).double()
            assert ((values - expected).abs() <= limit + 1e-6).all()
            if not vector:
                torch.testing.assert_close(values.sum((-2, -1)), expected.sum((-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'cait_xxs24_224'])
def test_attention_of_the_class_token(name, open_page):
    model = create(name, **VIT)
    page, batch = open_page(explorer_page(model, PICTURES)), preprocess(model, list(PICTURES.values()))
    page.get_by_label('head 1').first.click()
    page.get_by_text('head 1: mean distance').wait_for()
    said = page.locator('output').text_content()
    page.evaluate('net.meanDistances(); panel.describe()')  # before the next frame is drawn
    assert page.locator('output').text_content() == said
    page.get_by_label('Attention of the class token').check()
    page.get_by_text('Query: the class token.').wait_for()
    page.get_by_label('class token, head 1').last.click()
    page.get_by_text('head 1: most at row').wait_for()
    assert [layer.is_visible() for layer in page.locator('.layer').all()] == [False, False, True, True]
    box = page.locator('.tile div').last.bounding_box()
    assert box['width'] / box['height'] == pytest.approx(5 / 3, rel=0.05)
    for image in (0, 1):
        expected = torch.cat([layer[image] for layer in class_attention(model, batch)]).double()
        shown = page.evaluate(SHOWN, [dict(image=image), 0])[-len(expected):]
        error = (torch.tensor(shown, dtype=torch.double).view(expected.shape) - expected).abs()
        assert (error <= expected.amax((-2, -1), keepdim=True) / 100).all()


def test_pointer_keys_clicks_and_permalink(open_page):
    text = explorer_page(create('sa_learned_content_cifar'), PICTURES)
    page = open_page(text)
    stage = page.locator('.stage')
    page.mouse.move(*middle(stage, 2.5 / 8, 4.5 / 12))
    assert page.evaluate('net.query()') == 2 * 12 + 4
    for key in ('ArrowDown', 'ArrowRight', 'ArrowRight', 'ArrowUp', 'ArrowLeft', 'ArrowUp'):
        stage.press(key)
    assert page.evaluate('net.query()') == 1 * 12 + 5
    page.mouse.click(*middle(stage, 1.5 / 8, 5.5 / 12))  # pins
    page.mouse.move(*middle(stage, 0.1, 0.1))
    page.get_by_label('Layer 1, head 2').click()
    page.get_by_label('picture 1', exact=True).check(force=True)
    page.get_by_label('Average over the pictures').check()
    page.get_by_label('Sort by distance').check()
    page.get_by_text('Per-tile scale').click()
    page.get_by_text(re.compile('row 1, column 5.* Mean over 2 pictures. Layer 1, head 2')).wait_for()
    page.evaluate(until('location.hash.includes("sort=1") && location.hash.includes("scale=tile")'))
    seen = '[net.query(), [...document.querySelectorAll(".heads")].map(e => e.textContent), Array.from(net.shown)]'

    again = open_page(text, hash=page.evaluate('location.hash.slice(1)'))
    assert again.evaluate('({ ...state, at: 0 })') == page.evaluate('({ ...state, at: 0 })')
    assert again.evaluate(seen) == page.evaluate(seen)
    assert again.get_by_label('Layer 1, head 2').get_attribute('aria-pressed') == 'true'
    for expected in ([False, 5], [False, None]):  # the query first
        again.keyboard.press('Escape')
        assert again.evaluate('[state.pin, state.head]') == expected
    expected = np.mean([np.asarray(image, float) for image in PICTURES.values()], axis=0)
    np.testing.assert_allclose(decode(again.locator('.stage img').get_attribute('src')), expected, atol=1)
    assert not again.locator('.classes').is_visible()  # classes are of single pictures


# colour of the first pixel in the second row of each tile
COLOURS = """panel.tiles.map((_, i) => { const { image, width, height } = panel.atlases[0];
    return Array.from(image.data).splice(4 * (i * height + 1) * width, 3); })"""
YELLOW = [0xfd, 0xe7, 0x25]


def test_scales_shifts_classes_and_a_link_of_nonsense(open_page):
    model = create('sa_quadratic_cifar', depth=1, num_heads=2)
    set_heads(model.blocks[0], [[1., 0.], [0., 0.]], [9., 0.])  # to the pixel below the query, and to all equally
    model.head.fc.weight.data.zero_()
    model.head.fc.bias.data = torch.tensor([0., 3., 1., 2., *[-1.] * 6])
    page = open_page(explorer_page(model, PICTURES), hash='image=7&at=2,x&scale=nothing&head=9.9&sort=&epoch=3')
    assert page.evaluate('state') == dict(
        image=0, at=[0.5, 0.5], pin=False, scale='all', mean=False, sort=False, token=False, head=None, epoch=None)
    probs = model.head.fc.bias.softmax(0).tolist()
    assert page.locator('.classes li').all_text_contents() == [
        f'{name}{100 * probs[i]:.1f} %' for i, name in ((1, 'automobile'), (3, 'cat'), (2, 'bird'))]

    place = 8 * (1 / 96) ** 0.5  # of nine colours; a root makes 1 / 96 of the largest a tenth
    mixed = [a + (b - a) * place for a, b in zip((0x44, 0x01, 0x54), (0x47, 0x2d, 0x7b))]
    assert page.evaluate(COLOURS)[1] == pytest.approx(mixed, abs=2)
    assert page.locator('.scale span').all_text_contents() == ['0', '0.25', '1']
    page.get_by_text('Per-tile scale').click()
    page.locator('.scale').get_by_text('largest').wait_for()
    assert page.evaluate(COLOURS)[1] == YELLOW

    page.get_by_text('1 of 2 heads give more than half of their attention to one fixed offset').wait_for()
    assert page.locator('.tile').all_text_contents() == ['0 +1,0', '1']
    page.locator('.tile').nth(0).click()
    page.locator('.stage').click()  # in the middle; pins
    kernel = ','.join(str(int(i == 17)) for i in range(25))  # of 5 x 5, one below the middle
    link = page.get_by_text('Its shift in the theorem')
    link.wait_for()
    assert link.get_attribute('href') == f'theorem.html#kernel={kernel}&size=5&alpha=46&head=17'
    for head, share in ((0, '0.0 %'), (1, '1.0 %')):
        page.locator('.tile div').nth(head).hover(position=dict(x=1, y=1))
        page.get_by_text(f'Layer 0, head {head}: {share} to row 0, column 0').wait_for()
    pixels = page.evaluate('Array.from(panel.covers[0].image.data)')  # a preview over the picture, on its own scale
    assert pixels[:3] == YELLOW and 100 < pixels[3] < 230
    page.mouse.move(*middle(page.locator('.stage'), 5.5 / 8, 6.5 / 12))
    page.get_by_text('Layer 0, head 0: 100.0 % to row 5, column 6').wait_for()
    page.locator('.tile').first.click()
    link.wait_for(state='hidden')


def test_link_and_picture_of_the_view(open_page, tmp_path):
    model = create('sa_quadratic_cifar')
    write_run(tmp_path, model, (8, 12), range(2))
    page = open_page(explorer_page(model, PICTURES, run=tmp_path), hash='head=1.2&at=0.3,0.3',
                     permissions=['clipboard-read', 'clipboard-write'])
    page.get_by_text('Copy link').click()
    page.get_by_text('only the view was copied').wait_for()
    link = page.evaluate('navigator.clipboard.readText()')  # an address on this device is of no use to others
    assert link.startswith('#image=0') and 'head=1.2' in link and 'at=0.3000%2C0.3000' in link
    with page.expect_download() as download:
        page.get_by_text('Save PNG').click()
    saved = Image.open(download.value.path()).convert('RGB')
    drawn, cleared = page.evaluate('[paint().toDataURL(), (panel.fit(), paint().toDataURL())]')
    assert cleared == drawn  # although a layout that moved clears the canvases until the next frame
    page.evaluate('document.getElementById("view").classList.add("still")')  # as on the page, with title and scale
    assert page.locator('#mode').text_content() == 'picture 0, shared scale'
    view = page.locator('#view').bounding_box()
    assert saved.size == pytest.approx((2 * view['width'] + 64, 2 * view['height'] + 64), abs=2)
    for place in page.locator('#caption strong, #mode, .scale canvas, .tile div').all():  # in place, and no flat patch
        box = place.bounding_box()
        left, top = 2 * (box['x'] - view['x']) + 32, 2 * (box['y'] - view['y']) + 32
        assert len(saved.crop((left, top, left + 2 * box['width'], top + 2 * box['height'])).getcolors(1 << 16)) > 3


def test_the_film_plays_in_the_maps_and_counts_sharp_heads(open_page, tmp_path):
    model = create('sa_quadratic_gen_cifar')
    for block in model.blocks:
        set_heads(block, [[-3., 0.], [-2., 1.], [-3., -1.]], [[1.6, 0.3], [0., 1.3]])
    model.blocks[0].attn.encoding.spreads.data[0] = 9 * torch.eye(2)  # one at a single pixel
    blobs = position_blobs(model, (8, 12))

    def move_down():
        for block in model.blocks:
            block.attn.encoding.centers.data[:, 0] += 1

    write_run(tmp_path, model, (8, 12), range(91), move_down)
    page = open_page(explorer_page(model, PICTURES, run=tmp_path), hash='epoch=1', reduced_motion='reduce',
                     viewport=dict(width=1280, height=720))
    page.get_by_text('after epoch 1 of 90, heads at one pixel: 1, training loss 9.00. The maps').wait_for()
    slider = page.locator('.film input')
    assert slider.input_value() == '1' and slider.bounding_box()['y'] < 720  # without scrolling
    away = torch.cartesian_prod(torch.arange(8.) - 4, torch.arange(12.) - 6).double()
    for epoch in (0, 0.5, 2):
        for maps, layer in zip(torch.tensor(page.evaluate(SHOWN, [dict(epoch=epoch), 4 * 12 + 6])).split(3), blobs):
            d = away - (layer.centers + torch.tensor([epoch, 0.]))[:, None]
            expected = (torch.einsum('hka,hab,hkb->hk', d, layer.covariances.inverse(), d) / -2).softmax(-1)
            torch.testing.assert_close(maps.double(), expected, rtol=1e-3, atol=1e-5)
    assert page.locator('.kernel').text_content().endswith('; before training 1.')

    slider.press('ArrowLeft')
    assert page.evaluate('state.epoch') == 1
    slider.press('Home')
    page.get_by_text('untrained, before 90 epochs').wait_for()
    slider.press('Space')
    page.evaluate(until('state.epoch > 0'))
    assert page.evaluate('Number.isInteger(state.epoch)')  # where less motion is preferred
    page.get_by_text('Pause').click()
    page.get_by_text('Play').wait_for()
    slider.press('End')
    page.get_by_text(re.compile('after epoch 90 of 90.*validation accuracy 90.0 %')).wait_for()
    page.evaluate('net.film.heads.set([0, 0, 34090, 126900, -65780])')  # a stripe, rounded to four digits
    assert 0.05 < max(page.evaluate(SHOWN, [dict(epoch=0), 4 * 12 + 6])[0]) < 0.2


def test_what_cannot_be_shown_is_refused(tmp_path):
    model = create('sa_quadratic_cifar')
    with pytest.raises(ValueError, match='images: needs at least one'):
        explorer_page(model, {})
    with pytest.raises(ValueError, match='fewer or smaller images'):
        explorer_page(create('sa_learned_content_cifar', size=(128, 128)), PICTURES)
    for kwargs in dict(num_heads=2), dict(depth=1):
        write_run(tmp_path, create('sa_quadratic_cifar', **kwargs), (8, 12), range(2))
        with pytest.raises(ValueError, match='needs the history of a net with'):
            explorer_page(model, PICTURES, run=tmp_path)
    assert '"film": null' in explorer_page(model, PICTURES, run='resnet_tiny_cifar')  # its history does not ship


def test_a_dark_phone_keeps_picture_and_maps_in_sight(open_page):
    """390 pixels wide: maps above the fold, the picture sticks small at the top, a finger on the maps scrolls."""
    page = open_page(explorer_page(create('sa_quadratic_cifar', depth=6, num_heads=9), {
        f'picture {i}': picture(i) for i in range(10)}), color_scheme='dark',
        viewport=dict(width=390, height=700), has_touch=True, is_mobile=True)
    stage, tile = page.locator('.stage'), page.locator('.tile div')
    assert page.evaluate('[document.documentElement.scrollWidth, innerWidth]') == [390, 390]
    assert Image.open(io.BytesIO(page.screenshot())).convert('RGB').getpixel((1, 1))[0] < 50
    assert tile.nth(5).bounding_box()['y'] < 700  # the whole first layer
    swipe(page, *middle(tile.nth(5)), -340)
    scrolled = page.evaluate('scrollY')
    assert scrolled > 100
    box = stage.bounding_box()
    assert 0 <= box['y'] < 20 and box['y'] + box['height'] < 300
    before = page.evaluate('state.at')
    swipe(page, *middle(stage, 0.2, 0.2), 80)
    assert page.evaluate('scrollY') == scrolled and page.evaluate('state.at[0]') > before[0] + 0.1


def test_paper_forced_colours_and_no_script(open_page):
    explorer = explorer_page(create('sa_quadratic_cifar'), PICTURES)
    for text, tools in ((theorem_page(), '#play'), (explorer, '#tools')):
        page = open_page(text, java_script_enabled=False)
        assert page.locator('noscript p').is_visible() and page.locator('noscript img').is_visible()
        assert not page.locator('.stage').first.is_visible() and not page.locator('.options').is_visible()
        page = open_page(text, forced_colors='active')
        chosen, other = page.locator('.choice span:visible').all()
        colour = 'node => getComputedStyle(node).backgroundColor'
        assert chosen.evaluate(colour) != other.evaluate(colour)
        page.emulate_media(media='print')
        assert not page.locator(tools).is_visible() and page.locator('.tile').first.is_visible()
        assert page.evaluate('getComputedStyle(document.body).backgroundColor') == 'rgb(255, 255, 255)'
    page.evaluate('dispatchEvent(new Event("beforeprint"))')  # the print layout moves tiles, so each has its own canvas
    assert not page.locator('.layers > canvas').is_visible()
    assert page.locator('.tile canvas').count() == page.locator('.tile').count() == 6
    colours = """Array.from(document.querySelector('.tile canvas').getContext('2d').getImageData(9, 9, 1, 1).data)"""
    assert page.evaluate(colours)[3] == 255
    page.evaluate('dispatchEvent(new Event("afterprint"))')
    assert page.locator('.tile canvas').count() == 0


def test_names_of_imagenet_numbers_that_are_none_and_names_that_are_code(open_page):
    vit = create('vit_tiny_patch16_224', **VIT)
    vit.head.bias.data[0] += 100
    evil = '\udcff</script><script>document.title = "caught"</script><img src=x onerror=alert(1)>{{data}}&amp;\u2028'
    text = explorer_page(vit, {evil: picture(0)}, evil)
    assert 'tench, Tinca tinca' in text
    page = open_page(text)
    page.get_by_text('leave the class token out').wait_for()
    assert '<img src=x onerror=alert(1)>{{data}}&amp;' in page.title()
    assert page.locator('h2').text_content()[1:] == evil[1:]
    assert page.locator('#pictures input').get_attribute('aria-label')[1:] == evil[1:]
    assert page.locator('script').count() == 2 and page.locator('img[src=x]').count() == 0
    vit.head.bias.data[0] = math.nan
    assert 'NaN' not in re.search(r'id="data">(.*?)</script>', explorer_page(vit, PICTURES))[1]
    vit.blocks[0].attn.qkv.bias.data[0] = math.nan
    with pytest.raises(ValueError, match='attention maps are not finite'):
        explorer_page(vit, PICTURES)
