"""torch's functional transforms of every attention layer, against loops of plain calls."""
import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from timm_selfconv.layers import TERMS, SanAttention2d, SelfAttention2d, TokenAttention

LAYERS = {
    'factors': (lambda: SelfAttention2d(4, 2, encoding='learned', grid_size=(2, 3)), (2, 2, 3, 4)),
    'all terms': (lambda: SelfAttention2d(4, 2, TERMS, 'quadratic_gen'), (2, 2, 3, 4)),
    'tokens': (lambda: TokenAttention(4, 2), (2, 6, 4)),
    'pairwise': (lambda: SanAttention2d(32, 'pairwise'), (2, 32, 2, 3)),
    'patchwise': (lambda: SanAttention2d(32, 'patchwise'), (2, 32, 2, 3)),
}
every_layer = pytest.mark.parametrize('make,shape', LAYERS.values(), ids=list(LAYERS))


def prepared(make):
    torch.manual_seed(0)
    layer = make().double().eval()
    layer.fused_attn = False  # torch's fused attention has no forward mode
    return layer


@every_layer
def test_jacobian_and_hessian(make, shape):
    layer, x = prepared(make), torch.randn(1, *shape[1:], dtype=torch.float64)
    expected = jacobian(layer, x)
    torch.testing.assert_close(jacobian(layer, x, vectorize=True), expected)
    torch.testing.assert_close(jacobian(layer, x, vectorize=True, strategy='forward-mode'), expected)

    def scalar(part):
        return layer(torch.cat([part, x[..., 1:]], -1)).square().sum()

    torch.testing.assert_close(hessian(scalar, x[..., :1], vectorize=True), hessian(scalar, x[..., :1]))
