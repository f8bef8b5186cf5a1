"""Heads as Gaussians, against attention maps."""
import pytest
import timm
import torch

from timm_selfconv import attention_maps
from timm_selfconv.theory import convs_to_attention, position_blobs
from tiny_nets import random_net


@pytest.mark.parametrize('encoding', ['quadratic', 'quadratic_gen', 'learned'])
def test_moments_against_the_map_of_the_middle_query(encoding):
    """A quadratic head is its Gaussian if it is wide in pixels, and narrow in the grid."""
    grid = 24, 28
    net = random_net(encoding, img_size=tuple(2 * n for n in grid))
    spreads = dict(quadratic=torch.ones(4), quadratic_gen=torch.tensor([[1., 0.5], [0., 1.5]]).expand(4, 2, 2))
    for block in net.blocks if encoding in spreads else ():
        block.attn.encoding.spreads.data = 0.4 * spreads[encoding].double()
    blobs = position_blobs(net, grid)
    assert (position_blobs(net) is None) == (encoding == 'learned')
    maps = attention_maps(net, torch.zeros(1, 3, 2 * grid[0], 2 * grid[1], dtype=torch.double))
    offsets = torch.cartesian_prod(*(torch.arange(n) - n // 2 for n in grid)).double()
    for layer, layer_maps in zip(blobs, maps, strict=True):
        probs = layer_maps[0][:, grid[0] // 2, grid[1] // 2].flatten(1)
        covariances = torch.stack([torch.cov(offsets.T, correction=0, aweights=attention) for attention in probs])
        torch.testing.assert_close(layer.centers, probs @ offsets, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(layer.covariances, covariances, rtol=1e-3, atol=1e-3)


def test_convolutions_that_became_attention():
    cnn = timm.create_model('resnet_tiny_cifar', channels=(4,) * 4)
    blobs = position_blobs(convs_to_attention(cnn, 'layer4', alpha=2.)[0])
    assert [len(layer.centers) for layer in blobs] == [9, 9, 1, 9, 9]
    torch.testing.assert_close(blobs[0].covariances, torch.eye(2).double().expand(9, 2, 2) / 4)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_learned_content_cifar', {}), ('sa_quadratic_cifar', dict(encoding='absolute', terms=('content',))),
    ('resnet_tiny_cifar', {})])
def test_heads_that_follow_the_image_have_no_place(name, kwargs, small_net):
    assert position_blobs(small_net(name, **kwargs), (16, 16)) is None
