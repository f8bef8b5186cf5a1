import sys

import pytest
import timm
import torch
from timm.utils import AttentionExtract

import timm_selfconv

TINY = [
    'sa_quadratic_tiny_cifar', 'sa_learned_tiny_cifar', 'sa_learned_content_tiny_cifar',
    'sa_learned_content_hier_tiny_cifar']
SMALL = dict(embed_dim=16, mlp_dim=24, depth=3, num_heads=3)


@pytest.mark.parametrize('size', [(32, 32), (2, 2), (34, 18), (64, 32)])
def test_the_quadratic_net_takes_any_even_size(size, images):
    model = timm.create_model('sa_quadratic_cifar', **SMALL).eval()
    assert model(images(1, 3, *size)).shape == (1, 10)
    assert model.forward_features(images(1, 3, *size)).shape == (1, size[0] // 2, size[1] // 2, 16)


@pytest.mark.parametrize('name', TINY)
def test_another_image_size_resamples_learned_encodings(name, images):
    model = timm.create_model(name).eval()
    resized = timm.create_model(name, img_size=(64, 48)).eval()
    filter_fn = sys.modules[type(model).__module__].checkpoint_filter_fn
    resized.load_state_dict(filter_fn(model.state_dict(), resized))
    model.set_input_size((64, 48))
    x = images(1, 3, 64, 48)
    torch.testing.assert_close(model(x), resized(x))
    assert model(x).shape == (1, 10)


@pytest.mark.parametrize('kwargs,match', [
    (dict(num_heads=(9, 9)), r'num_heads=\(9, 9\).*6 layers'),
    (dict(num_heads=(3, 3), hierarchical=True), r'num_heads=\(3, 3\): needs one number'),
    (dict(num_heads=(9, 9, 9, 9, 9, 0)), 'num_heads=0'),
    (dict(encoding='nearest'), "encoding='nearest'"),
    (dict(terms='position', encoding='sinusoid'), 'absolute'),
])
def test_arguments_that_make_no_sense_are_named(kwargs, match):
    with pytest.raises(ValueError, match=match):
        timm.create_model('sa_quadratic_cifar', **kwargs)


@pytest.mark.parametrize('name', [*TINY, 'sa_quadratic_gen_cifar'])
def test_attention_extract_sees_the_maps(name, images, explicit_maps):
    model = timm.create_model(name, **SMALL).eval()
    x = images(2, 3, 16, 16)
    maps = timm_selfconv.attention_maps(model, x)
    extracted = AttentionExtract(model, method='hook')(x)
    assert len(maps) == 3 and len(extracted) == len(model.blocks)
    for seen, expected in zip(extracted.values(), maps[-len(extracted):]):  # of a shared layer the last pass
        torch.testing.assert_close(seen.expand(2, -1, -1, -1), expected.flatten(4).flatten(2, 3))
    with explicit_maps():
        explicit = timm.create_model(name, **SMALL).eval()
    explicit.load_state_dict(model.state_dict())
    traced = AttentionExtract(explicit, method='fx')(x)
    assert [n.rsplit('.', 1)[-1] for n in traced] == ['softmax'] * len(model.blocks)
    for seen, expected in zip(traced.values(), maps):  # of a shared layer the first pass
        torch.testing.assert_close(seen.expand(2, -1, -1, -1), expected.flatten(4).flatten(2, 3))
