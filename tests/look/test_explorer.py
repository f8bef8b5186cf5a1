"""The explorer's page, in a real browser, and what is packed into it."""
import base64
import io
import json
import re
import shutil
import zlib

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import timm_selfconv
from timm_selfconv.look import explorer
from timm_selfconv.data import preprocess
from timm_selfconv.look.explorer import LEVELS, explorer_page, offset_tables, pack, pack_maps, quantise, \
    shared_bytes
from timm_selfconv.layers import SelfAttention2d

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync']
SMALL = dict(embed_dim=16, mlp_dim=8, depth=2, num_heads=3, img_size=(16, 24))
MAPS = """async ([view, mean, image, query]) => {
    await ready;
    Object.assign(state, { view, mean, image });
    return panels.map(({ net }) => { net.show(query); return Array.from(net.shown); });
}"""


def picture(seed):
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (16, 24, 3), dtype=np.uint8))


def create(name, gain=1., **kwargs):
    """A small net of random weights; a gain over 1 makes the maps of nets with content peaked."""
    torch.manual_seed(0)
    model = timm.create_model(name, **dict(SMALL, **kwargs)).eval()
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, 16, 24))
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith('query.weight')):
            parameter.mul_(gain)
        for parameter in (p for n, p in model.named_parameters() if n.endswith('spreads')):
            parameter.add_(0.4 * torch.randn_like(parameter))  # precisions that couple the axes
    return model


PICTURES = {f'picture {i}': picture(i) for i in range(2)}


@pytest.fixture(scope='module')
def browser():
    if CHROMIUM is None:
        pytest.skip('no chromium here: apt-get install chromium')
    with pytest.importorskip('playwright.sync_api').sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page's text as a file, and fail if it complains, or asks for any other."""
    contexts, complaints = [], []

    def open_text(text, hash='', **kwargs):
        file = tmp_path / 'explorer.html'
        file.write_text(text, encoding='utf-8')
        contexts.append(browser.new_context(**kwargs))
        page = contexts[-1].new_page()
        page.on('console', lambda message: complaints.append(message.text))
        page.on('pageerror', lambda error: complaints.append(str(error)))
        page.on('request', lambda request: complaints.append(request.url) if request.url.split('#')[0] != file.as_uri()
                and not request.url.startswith('data:') else None)
        page.goto(f'{file.as_uri()}#{hash}')
        page.evaluate('ready')
        return page

    yield open_text
    for context in contexts:
        context.close()
    assert complaints == []


def levels_of(text):
    return [int(n) for n in re.findall(r'"levels": (\d+)', text)]


def check_maps(shown, expected, step):
    """Maps of a query, heads side by side, equal those of shape (heads, H, W) to a step of each's largest."""
    shown = torch.tensor(shown, dtype=torch.float64).view(expected.shape)
    error = (shown - expected.double()).abs().amax((-2, -1))
    assert (error <= step * expected.double().amax((-2, -1)) + 1e-6).all()


@pytest.mark.parametrize('name,kwargs', [
    ('sa_quadratic_cifar', {}), ('sa_quadratic_gen_cifar', {}), ('sa_learned_cifar', {}),
    ('sa_learned_content_cifar', {}), ('sa_learned_content_cifar', dict(gain=20.)),
    ('sa_learned_content_hier_cifar', dict(gain=5.)),
    ('sa_quadratic_gen_cifar', dict(terms=('content', 'content_position', 'key_bias', 'position'))),
    ('sa_quadratic_cifar', dict(terms=('content',), encoding='sinusoid')), ('resvit_cifar', dict(gain=30.)),
])
def test_maps_of_the_page_are_those_of_the_net(name, kwargs, open_page):
    model = create(name, **kwargs)
    text = explorer_page({name: model}, PICTURES)
    page = open_page(text)
    maps = torch.cat(timm_selfconv.attention_maps(model, preprocess(model, list(PICTURES.values()))), dim=1)
    step = 1 / levels_of(text)[0] if levels_of(text) else 1e-4
    height, width = maps.shape[-2:]
    for query in (0, width - 1, 3 * width + 5, height * width - 1):
        expected = maps[:, :, query // width, query % width]
        for image in (0, 1):
            check_maps(page.evaluate(MAPS, ['all', False, image, query])[0], expected[image], step)
        mean = torch.tensor(page.evaluate(MAPS, ['all', True, 0, query])[0]).view(expected[0].shape)
        peaks = expected.double().amax((-2, -1)).mean(0)
        assert ((mean - expected.double().mean(0)).abs().amax((-2, -1)) <= step * peaks + 1e-6).all()


def test_terms_alone(open_page):
    """Position only and content only, against queries, keys and tables multiplied by hand, in float64."""
    model = create('sa_learned_content_cifar', gain=8.)
    text = explorer_page({'net': model}, PICTURES)
    page, step = open_page(text), 1 / levels_of(text)[0]
    inputs = []
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, args: inputs.append((m, args[0].double())))
    with torch.no_grad():
        model(preprocess(model, list(PICTURES.values())))
    height, width, image, query = 8, 12, 1, 3 * 12 + 4
    content, position = [], []
    for layer, x in inputs:
        def project(linear, x):
            return (x @ linear.weight.double().T + linear.bias.double()).unflatten(-1, (3, 16)).detach()

        q, k = project(layer.query, x[image, query // width, query % width]), project(layer.key, x[image])
        row, col = layer.encoding.row_table.detach().double(), layer.encoding.col_table.detach().double()
        for h in range(3):
            content.append(torch.stack([q[h] @ k[i, j, h] for i in range(height) for j in range(width)]) / 4)
            position.append(torch.stack([
                q[h, :8] @ row[i - 3 + height - 1] + q[h, 8:] @ col[j - 4 + width - 1]
                for i in range(height) for j in range(width)]) / 4)
    for view, scores in (('content', content), ('position', position)):
        expected = torch.stack(scores).softmax(-1).view(6, height, width)
        check_maps(page.evaluate(MAPS, [view, False, image, query])[0], expected, step)
    assert (torch.stack(content).softmax(-1) - torch.stack(position).softmax(-1)).abs().max() > 0.1


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
    page.wait_for_timeout(500)
    assert 'sort=1' in page.evaluate('location.hash')
    assert 'row 1, column 5' in page.locator('output').nth(1).text_content()
    assert 'Layer 1, head 2' in page.locator('output').nth(1).text_content()
    order = '[...document.querySelectorAll(".heads")].map(e => e.textContent)'
    shown = page.evaluate('panels.map(({ net }) => Array.from(net.shown))')
    link, sorted_heads = page.evaluate('location.hash.slice(1)'), page.evaluate(order)

    again = open_page(text, hash=link)
    again.wait_for_timeout(300)
    assert again.evaluate('state') == {
        **page.evaluate('state'), 'at': pytest.approx(page.evaluate('state.at'), abs=1e-4)}
    assert again.evaluate(order) == sorted_heads
    assert again.evaluate('panels.map(({ net }) => Array.from(net.shown))') == shown
    assert again.evaluate('panels[1].tiles[5].button.getAttribute("aria-pressed")') == 'true'
    again.keyboard.press('Escape')
    assert again.evaluate('state.heads') == [None, None]


def test_a_link_of_nonsense_changes_nothing(open_page):
    page = open_page(explorer_page({'net': create('sa_learned_cifar')}, PICTURES),
                     hash='image=7&at=2,x&view=nothing&heads=9.9&sort=')
    assert page.evaluate('state') == dict(image=0, at=[0.5, 0.5], view='all', mean=False, sort=False, heads=[None])


@pytest.mark.parametrize('scheme,width', [('light', 1280), ('dark', 360)])
def test_screen(scheme, width, open_page):
    nets = {'first': create('sa_quadratic_cifar', num_heads=16), 'a_rather_long_name_' * 4: create('sa_learned_cifar')}
    page = open_page(explorer_page(nets, PICTURES), color_scheme=scheme, viewport=dict(width=width, height=800))
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
    page.wait_for_timeout(200)
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert('RGB')
    assert shot.width == width
    assert (shot.getpixel((1, 1))[0] > 200) == (scheme == 'light')
    tiles = page.locator('.tile div').all()
    assert len(tiles) == 2 * 16 + 2 * 3
    for tile in tiles:
        box = tile.bounding_box()
        place = (box['x'], box['y'], box['x'] + box['width'], box['y'] + box['height'])
        assert len(shot.crop(place).getcolors()) > 3  # a map and a frame, not one colour
    assert any(colour == (0xfd, 0xe7, 0x25) for _, colour in shot.getcolors(1 << 24))  # the scale's last


def test_what_the_user_names_is_text(open_page):
    evil = '</script><script>document.title = "caught"</script><img src=x onerror=alert(1)>{{data}}&amp;\u2028'
    page = open_page(explorer_page({evil: create('sa_learned_cifar')}, {evil: picture(0)}))
    assert page.title() == f'Attention explorer: {evil}'.replace('\u2028', ' ') or evil in page.title()
    assert page.locator('h2').text_content() == evil
    assert page.locator('#pictures input').get_attribute('aria-label') == evil
    assert page.locator('script').count() == 2 and page.locator('img[src=x]').count() == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.floats(0, 60), st.integers(0, 2 ** 31))
def test_one_byte_serves_two_maps(heads, height, width, gain, seed):
    """What the page does with the bytes, in float64: both maps are right to a step of their largest probability."""
    generator = torch.Generator().manual_seed(seed)
    size = height * width
    content = gain * torch.randn(2, heads, size, size, generator=generator).double()
    rows = gain * torch.randn(2, heads, size, height, generator=generator).double()
    cols = gain * torch.randn(2, heads, size, width, generator=generator).double()
    bias = (rows[..., :, None] + cols[..., None, :]).flatten(-2)
    packed = pack_maps(shared_bytes(content, bias, (height, width)))
    step = 1 / packed['levels']

    def unpack(name, dtype, *shape):
        array = np.frombuffer(zlib.decompress(base64.b64decode(packed[name])), dtype)
        return torch.from_numpy(array.astype(np.float64)).view(shape)

    larger = unpack('larger', 'u1', 2, heads, size, size) * step
    peaks = unpack('peaks', '<f4', 2, 2, heads, size)[..., None]
    scores = unpack('rows', '<i4', 2, heads, size, height, 1) + unpack('cols', '<i4', 2, heads, size, 1, width)
    scores = scores.flatten(-2) * step / 3
    for sign, peak, expected in ((1, peaks[0], content + bias), (-1, peaks[1], content)):
        error = larger * (sign * scores).clamp(max=0).exp() * peak - expected.softmax(-1)
        assert (error.abs() <= step * peak + 1e-6).all()
    assert ((scores.softmax(-1) - bias.softmax(-1)).abs() <= step * bias.softmax(-1).amax(-1, keepdim=True)).all()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 255)), st.sampled_from([torch.uint8, torch.int16, torch.float32]))
def test_pack(values, dtype):
    packed = pack(torch.tensor(values, dtype=dtype))
    array = np.frombuffer(zlib.decompress(base64.b64decode(packed)), pack_dtype(dtype))
    assert array.tolist() == values


def pack_dtype(dtype):
    return {torch.uint8: 'u1', torch.int16: '<i2', torch.float32: '<f4'}[dtype]


def test_quantise():
    x = torch.tensor([-1e9, -0.26, 0.24, 0.26, 1e9])
    assert quantise(x, 0.5, torch.int16).tolist() == [-32768, -1, 0, 1, 32767]


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_quadratic_gen_cifar', 'sa_learned_cifar'])
@pytest.mark.parametrize('grid', [(1, 5), (4, 6), (1, 1)])
def test_offset_tables(name, grid):
    layer = create(name).blocks[0].attn
    with torch.no_grad():
        expected = layer.scores(torch.zeros(1, *grid, 16))[0].view(3, *grid, *grid).double()
    rows, cols, cross = offset_tables(layer, *grid)
    for q1 in range(grid[0]):
        for q2 in range(grid[1]):
            for k1 in range(grid[0]):
                for k2 in range(grid[1]):
                    d1, d2 = k1 - q1, k2 - q2
                    score = rows[:, d1 + grid[0] - 1] + cols[:, d2 + grid[1] - 1] + cross * d1 * d2
                    zero = rows[:, grid[0] - 1] + cols[:, grid[1] - 1]
                    torch.testing.assert_close(
                        score - zero, expected[:, q1, q2, k1, k2] - expected[:, q1, q2, q1, q2], atol=1e-3, rtol=1e-4)


def test_steps_grow_until_the_page_fits(monkeypatch):
    parts = dict(larger=torch.rand(1, 1, 256, 256, generator=torch.Generator().manual_seed(0)),
                 peaks=torch.rand(1, 1, 1, 256))  # noise, which nothing compresses
    assert pack_maps(parts)['levels'] == LEVELS[0]  # a small page needs no thrift
    monkeypatch.setattr(explorer, 'ENTRIES', 256 ** 2)
    packed = pack_maps(parts)
    assert packed['levels'] < LEVELS[0]
    assert sum(len(text) for text in packed.values() if isinstance(text, str)) * 3 / 4 <= 0.61 * 256 ** 2


def test_sizes():
    """A net of positions alone takes little room, however many pixels."""
    model = timm.create_model('sa_quadratic_gen_cifar', embed_dim=16, mlp_dim=8)
    images = {str(i): picture(i) for i in range(4)}
    page = explorer_page({'net': model}, images)
    assert len(page.encode()) < 2e6
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data['nets'][0]['grid'] == [16, 16] and data['nets'][0]['heads'] == [9] * 6


@pytest.mark.parametrize('name', ['resnet18_cifar', 'san_pairwise_cifar'])
def test_nets_without_attention_maps_are_refused(name):
    with pytest.raises(ValueError, match='has no attention maps'):
        explorer_page({name: timm.create_model(name)}, PICTURES)


def test_nothing_to_show_is_refused():
    with pytest.raises(ValueError, match='models and images'):
        explorer_page({}, PICTURES)
    with pytest.raises(ValueError, match='models and images'):
        explorer_page({'net': create('sa_learned_cifar')}, {})


def test_too_many_maps_are_refused():
    model = timm.create_model('sa_learned_content_cifar', embed_dim=8, mlp_dim=8, num_heads=1, depth=1, img_size=256)
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, 256, 256))
    with pytest.raises(ValueError, match='name fewer images'):
        explorer_page({'net': model}, PICTURES)
