import pytest
import timm
import torch

import timm_selfconv

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2, num_heads=(2, 3))


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_quadratic_gen_cifar', 'sa_learned_content_cifar'])
def test_maps_are_probabilities_and_the_same_on_every_path(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL).train()
    images = torch.randn(2, 3, 8, 12)
    maps = timm_selfconv.attention_maps(model, images)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    assert [m.shape for m in maps] == [(2, 2, 4, 6, 4, 6), (2, 3, 4, 6, 4, 6)]
    for m in maps:
        torch.testing.assert_close(m.sum((-2, -1)), torch.ones(m.shape[:4]))
    for block in model.blocks:
        block.attn.fused_attn = False
    for m, explicit in zip(maps, timm_selfconv.attention_maps(model, images)):
        torch.testing.assert_close(m, explicit)


def test_query_pixel_comes_first():
    """A head that looks one row down and two columns right puts the query's weight there."""
    model = timm.create_model('sa_quadratic_cifar', embed_dim=8, mlp_dim=8, depth=1, num_heads=1)
    encoding = model.blocks[0].attn.encoding
    with torch.no_grad():
        encoding.centers.copy_(torch.tensor([[1., 2.]]))
        encoding.spreads.fill_(9.)
    m, = timm_selfconv.attention_maps(model, torch.randn(1, 3, 12, 16))
    assert m[0, 0, 2, 3, 3, 5].item() == pytest.approx(1.)


def test_nets_without_attention_are_refused():
    with pytest.raises(ValueError, match='model=ResNetCifar'):
        timm_selfconv.attention_maps(timm.create_model('resnet18_cifar'), torch.randn(1, 3, 32, 32))
