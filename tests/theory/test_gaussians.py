"""Heads as Gaussians, against densities and attention maps."""
import pytest
import timm
import torch

from drawn import SMALL
from timm_selfconv import attention_maps
from timm_selfconv.theory import encoding_blobs, position_blobs


def test_moments_of_learned_heads_against_the_map_of_the_middle_query():
    """Mean and covariance of the explicit map. The off-diagonal entry is 0, because scores are separable."""
    grid = 12, 16
    torch.manual_seed(0)
    net = timm.create_model('sa_learned_cifar', num_heads=3, **SMALL).double().eval()
    for block in net.blocks:
        torch.nn.init.normal_(block.attn.encoding.row_keys)
        torch.nn.init.normal_(block.attn.encoding.col_keys)
    blobs = position_blobs(net, grid)
    assert encoding_blobs(net) is None
    maps = attention_maps(net, torch.zeros(1, 3, 2 * grid[0], 2 * grid[1], dtype=torch.double))
    offsets = torch.stack(torch.meshgrid(*(torch.arange(n) - n // 2 for n in grid), indexing='ij'), -1).double()
    for layer, layer_maps in zip(blobs, maps, strict=True):
        probs = layer_maps[0][:, grid[0] // 2, grid[1] // 2]
        centers = torch.einsum('hij,ijd->hd', probs, offsets)
        distance = offsets - centers[:, None, None]
        covariances = torch.einsum('hij,hijd,hije->hde', probs, distance, distance)
        torch.testing.assert_close(layer.centers, centers)
        torch.testing.assert_close(layer.covariances, covariances, rtol=1e-6, atol=1e-9)


def test_quadratic_heads_are_their_gaussians_on_any_grid():
    net = timm.create_model('sa_quadratic_gen_cifar', num_heads=2, **SMALL)
    for layer, wanted in zip(position_blobs(net, (4, 4)), encoding_blobs(net), strict=True):
        torch.testing.assert_close(layer.centers, wanted.centers, rtol=0, atol=0)
        torch.testing.assert_close(layer.covariances, wanted.covariances, rtol=0, atol=0)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_learned_content_cifar', {}), ('sa_quadratic_cifar', dict(encoding='absolute', terms=('content',))),
    ('resnet_tiny_cifar', {})])
def test_heads_that_follow_the_image_have_no_place(name, kwargs, small_net):
    net = small_net(name, **kwargs)
    assert position_blobs(net, (16, 16)) is None and encoding_blobs(net) is None
