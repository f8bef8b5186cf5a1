"""Data of the explorer's page, read in a real browser, against the nets' own maps."""
import pytest
import timm
import torch

import timm_selfconv
from explored import PICTURES, SHOWN, create
from timm_selfconv.data import preprocess
from timm_selfconv.look.attention_maps import class_attention, footprint_weights
from timm_selfconv.look.explorer import explorer_page
from timm_selfconv.theory import convs_to_attention

pytestmark = pytest.mark.slow
ALL_TERMS = ('content', 'content_position', 'key_bias', 'position')
VIT, SAN = dict(embed_dim=24, depth=2, num_heads=3), dict(channels=(32, 32), depths=(1, 1))


def timm_net(name, **kwargs):
    """Make a net with sharp maps; a ResNet gets attention in two stages."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=(48, 80), **kwargs).eval()
    if name.startswith('resnet'):
        model, _ = convs_to_attention(model, ['layer3', 'layer4'], alpha=3.)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, 48, 80), crop_pct=1.)
    return model


@pytest.mark.parametrize('make,name,kwargs,finest', [
    (create, 'sa_quadratic_gen_cifar', {}, (8, 12)),
    (create, 'sa_learned_cifar', {}, (8, 12)),
    (create, 'sa_learned_content_cifar', dict(gain=20.), (8, 12)),
    (create, 'sa_quadratic_gen_cifar', dict(terms=ALL_TERMS), (8, 12)),
    (create, 'sa_quadratic_cifar', dict(terms=('content',), encoding='sinusoid'), (8, 12)),
    (create, 'resvit_cifar', dict(gain=30.), (8, 12)),
    (create, 'san_pairwise_cifar', SAN, (8, 12)),
    (create, 'san_patchwise_hier_cifar', SAN, (16, 24)),
    (timm_net, 'swin_tiny_patch4_window7_224', dict(
        embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=4), (12, 20)),
    (timm_net, 'resnet_tiny_cifar', dict(channels=(4,) * 4, layers=(1,) * 4), (24, 40))])
def test_the_page_has_the_maps_of_the_net(make, name, kwargs, finest, open_page):
    """On a coarser layer, the query is at the same place of the picture."""
    model, vector = make(name, **kwargs), name.startswith('san')
    text, batch = explorer_page(model, PICTURES), preprocess(model, list(PICTURES.values()))
    page, step = open_page(text), 1e-4 if '"tables"' in text else 1 / 100
    maps = (footprint_weights if vector else timm_selfconv.attention_maps)(model, batch)
    height, width = page.evaluate('net.grid')
    assert (height, width) == finest
    for query in (0, width - 1, height // 2 * width + width // 3, height * width - 1):
        shown = [page.evaluate(SHOWN, [dict(image=i % 2, mean=i == 2), query]) for i in range(3)]
        for layer in maps:
            row, col = query // width * layer.shape[2] // height, query % width * layer.shape[3] // width
            each = layer[:, :, row, col].double()
            limit = each.amax((-2, -1), keepdim=True) * step
            if vector:
                limit = torch.full_like(limit, layer.abs().max() / 253)
            expected, limit = (torch.cat([x, x.mean(0, keepdim=True)]) for x in (each, limit))
            heads = [[values.pop(0) for _ in each[0]] for values in shown]
            values = torch.tensor(heads, dtype=torch.double).view(expected.shape)
            assert ((values - expected).abs() <= limit + 1e-6).all()
            if not vector:
                torch.testing.assert_close(values.sum((-2, -1)), expected.sum((-2, -1)), atol=1e-5, rtol=0)
    if vector:
        names = page.evaluate('net.layers.map(layer => layer.name)')
        assert names == (['Pass 0, block 0', 'Pass 1, block 0'] if 'hier' in name else ['Bottleneck 0', 'Bottleneck 1'])


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'cait_xxs24_224'])
def test_attention_of_the_class_token(name, open_page):
    model = timm_net(name, **VIT)
    page, batch = open_page(explorer_page(model, PICTURES)), preprocess(model, list(PICTURES.values()))
    token, patches = class_attention(model, batch), len(timm_selfconv.attention_maps(model, batch))
    page.get_by_label('head 1').first.click()
    page.get_by_text('head 1: mean distance').wait_for()
    said = page.locator('output').text_content()
    page.evaluate('net.meanDistances(); panel.describe()')  # before the next frame is drawn
    assert page.locator('output').text_content() == said
    page.get_by_label('Attention of the class token').check()
    page.get_by_text('Query: the class token.').wait_for()
    page.get_by_label('class token, head 1').last.click()
    page.get_by_text('head 1: most at row').wait_for()
    layers = page.locator('.layer')
    assert [layer.is_visible() for layer in layers.all()] == [False] * patches + [True] * len(token)
    box = layers.last.locator('.tile div').first.bounding_box()
    assert box['width'] / box['height'] == pytest.approx(5 / 3, rel=0.05)
    for image in (0, 1):
        expected = torch.cat([layer[image] for layer in token]).double()
        shown = page.evaluate(SHOWN, [dict(image=image), 0])[-len(expected):]
        error = (torch.tensor(shown, dtype=torch.double).view(expected.shape) - expected).abs()
        assert (error <= expected.amax((-2, -1), keepdim=True) / 100).all()


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match='images: needs at least one'):
        explorer_page(create('sa_learned_cifar'), {})
    large = timm.create_model('sa_learned_content_cifar', embed_dim=8, mlp_dim=8, num_heads=1, depth=1, img_size=256)
    large.pretrained_cfg = dict(large.pretrained_cfg, input_size=(3, 256, 256))
    with pytest.raises(ValueError, match='fewer or smaller images'):
        explorer_page(large, PICTURES)
