"""Data of the explorer's page, read in a real browser, against the nets' own maps."""
import pytest
import timm
import torch

import timm_selfconv
from drawn import until
from explored import PICTURES, create
from timm_selfconv.data import preprocess
from timm_selfconv.look.attention_maps import class_attention, footprint_weights, has_class_token
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.theory import convs_to_attention

pytestmark = pytest.mark.slow
MAPS = """async ([mean, image, query]) => {
    Object.assign(state, { mean, image });
    await net.load();
    net.show(query);
    return Array.from(net.shown.slice(0, net.layers.filter(layer => !layer.token).at(-1).end));
}"""


def check_maps(shown, expected, step):
    """Check maps of a query against expected maps, shape (heads, H, W), up to one step of the largest value of each."""
    shown = torch.tensor(shown, dtype=torch.float64).view(expected.shape)
    error = (shown - expected.double()).abs().amax((-2, -1))
    assert (error <= step * expected.double().amax((-2, -1)) + 1e-6).all()
    torch.testing.assert_close(shown.sum((-2, -1)), expected.double().sum((-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_quadratic_gen_cifar', {}), ('sa_learned_cifar', {}), ('sa_learned_content_cifar', dict(gain=20.)),
    ('sa_quadratic_gen_cifar', dict(terms=('content', 'content_position', 'key_bias', 'position'))),
    ('sa_quadratic_cifar', dict(terms=('content',), encoding='sinusoid')), ('resvit_cifar', dict(gain=30.)),
])
def test_the_page_has_the_maps_of_the_net(name, kwargs, open_page):
    model = create(name, **kwargs)
    text = explorer_page(model, PICTURES)
    page = open_page(text)
    maps = torch.cat(timm_selfconv.attention_maps(model, preprocess(model, list(PICTURES.values()))), dim=1)
    step = 1e-4 if '"tables"' in text else 1 / 100
    height, width = maps.shape[-2:]
    for query in (0, width - 1, 3 * width + 5, height * width - 1):
        expected = maps[:, :, query // width, query % width]
        for image in (0, 1):
            check_maps(page.evaluate(MAPS, [False, image, query]), expected[image], step)
        mean = torch.tensor(page.evaluate(MAPS, [True, 0, query])).view(expected[0].shape)
        peaks = expected.double().amax((-2, -1)).mean(0)
        assert ((mean - expected.double().mean(0)).abs().amax((-2, -1)) <= step * peaks + 1e-6).all()


SHOWN = """async ([token, image, query]) => {
    Object.assign(state, { token, image });
    await net.load();
    net.show(query);
    return net.heads.map((_, i) => Array.from(net.head(i)));
}"""


@pytest.mark.parametrize('name,kwargs,finest', [
    ('swin_tiny_patch4_window7_224', dict(embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=4), (12, 20)),
    ('resnet_tiny_cifar', dict(channels=(4,) * 4, layers=(1,) * 4), (24, 40)),
    ('vit_tiny_patch16_224', dict(embed_dim=24, depth=2, num_heads=3), (3, 5)),
    ('cait_xxs24_224', dict(embed_dim=24, depth=2, num_heads=3), (3, 5))])
def test_each_layer_has_its_grid_and_class_tokens_are_shown(name, kwargs, finest, open_page):
    """On a coarser layer, the query is at the same place of the picture."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=(48, 80), **kwargs).eval()
    if name.startswith('resnet'):
        model, _ = convs_to_attention(model, ['layer3', 'layer4'], alpha=3.)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, 48, 80), crop_pct=1.)
    page, batch = open_page(explorer_page(model, PICTURES)), preprocess(model, list(PICTURES.values()))
    maps = timm_selfconv.attention_maps(model, batch)
    token = class_attention(model, batch) if has_class_token(model) else []
    layers = page.locator('.layer')
    assert layers.count() == len(maps) + len(token)
    assert tuple(page.evaluate('net.grid')) == finest
    row, col = finest[0] - 1, finest[1] // 3
    for image in (0, 1):
        shown = iter(page.evaluate(SHOWN, [False, image, row * finest[1] + col]))
        for m in maps:
            own = row * m.shape[2] // finest[0], col * m.shape[3] // finest[1]
            check_maps([next(shown) for _ in m[image]], m[image, :, own[0], own[1]], 1 / 100)
        shown = page.evaluate(SHOWN, [True, image, 0])
        if token:
            check_maps(shown[-sum(m.shape[1] for m in token):], torch.cat([m[image] for m in token]), 1 / 100)

    switch = page.get_by_label('Attention of the class token')
    assert switch.is_visible() == bool(token)
    if token:
        switch.check()
        page.evaluate(until('location.hash.includes("token=1")'))
        assert 'the class token' in page.locator('output').text_content()
        page.get_by_label('class token, head 1').last.click()
        page.get_by_text('head 1: most at row').wait_for()
    else:
        page.get_by_label('head 1').last.click()
        page.get_by_text('head 1: mean distance').wait_for()
        said = page.locator('output').text_content()
        page.evaluate('net.meanDistances(); panel.describe()')  # before the next frame is drawn
        assert page.locator('output').text_content() == said
    seen = [group.is_visible() for group in layers.all()]
    assert seen == [not token] * len(maps) + [True] * len(token)
    for group in layers.all():
        if group.is_visible():
            box, (height, width) = group.locator('.tile div').first.bounding_box(), (3, 5)
            assert box['width'] / box['height'] == pytest.approx(width / height, rel=0.05)


@pytest.mark.parametrize('name', ['san_pairwise_cifar', 'san_patchwise_hier_cifar'])
def test_the_page_has_the_footprints_of_the_net(name, open_page):
    model = create(name, channels=(32, 32), depths=(1, 1))
    page = open_page(explorer_page(model, PICTURES))
    weights = footprint_weights(model, preprocess(model, list(PICTURES.values())))
    height, width = page.evaluate('net.grid')
    assert (height, width) == tuple(weights[0].shape[2:4])
    for query in (0, width - 1, 3 * width + 5, height * width - 1):
        for image in (0, 1):
            shown = torch.tensor(page.evaluate(MAPS, [False, image, query])).view(-1, 3, 3)
            for w, part in zip(weights, shown.split([w.shape[1] for w in weights]), strict=True):
                row, col = query // width * w.shape[2] // height, query % width * w.shape[3] // width
                torch.testing.assert_close(part, w[image, :, row, col], atol=w.abs().max().item() / 253, rtol=0)
    names = page.evaluate('net.layers.map(layer => layer.name)')
    assert names == (['Pass 0, block 0', 'Pass 1, block 0'] if 'hier' in name else ['Bottleneck 0', 'Bottleneck 1'])


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match='images: needs at least one'):
        explorer_page(create('sa_learned_cifar'), {})
    large = timm.create_model('sa_learned_content_cifar', embed_dim=8, mlp_dim=8, num_heads=1, depth=1, img_size=256)
    large.pretrained_cfg = dict(large.pretrained_cfg, input_size=(3, 256, 256))
    with pytest.raises(ValueError, match='fewer or smaller images'):
        explorer_page(large, PICTURES)
