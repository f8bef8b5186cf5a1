"""torch's functional transforms of every attention layer, against loops of plain calls."""
import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from timm_selfconv.layers import TERMS, SelfAttention2d, TokenAttention
from timm_selfconv.layers.san_attention import SanAttention2d

LAYERS = {
    'factors': lambda: SelfAttention2d(4, 2, encoding='learned', grid_size=(2, 3)),
    'all terms': lambda: SelfAttention2d(4, 2, TERMS, 'quadratic_gen'),
    'tokens': lambda: TokenAttention(4, 2),
    'pairwise': lambda: SanAttention2d(32, 'pairwise'),
    'patchwise': lambda: SanAttention2d(32, 'patchwise'),
}
SHAPES = {SelfAttention2d: (2, 2, 3, 4), TokenAttention: (2, 6, 4), SanAttention2d: (2, 32, 2, 3)}


def make(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]().double().eval()
    layer.fused_attn = False  # torch's fused attention has no forward mode
    return layer


@pytest.fixture(params=LAYERS)
def kind(request):
    return request.param


@pytest.fixture
def layer(kind):
    return make(kind)


@pytest.fixture
def x(layer):
    return torch.randn(SHAPES[type(layer)], dtype=torch.float64, requires_grad=True)


def test_jacobian_and_hessian(layer, x):
    x = x.detach()[:1]
    expected = jacobian(layer, x)
    torch.testing.assert_close(jacobian(layer, x, vectorize=True), expected)
    torch.testing.assert_close(jacobian(layer, x, vectorize=True, strategy='forward-mode'), expected)

    def scalar(part):
        return layer(torch.cat([part, x[..., 1:]], -1)).square().sum()

    torch.testing.assert_close(hessian(scalar, x[..., :1], vectorize=True), hessian(scalar, x[..., :1]))


def test_gradients_image_by_image(layer, x):
    parameters = dict(layer.named_parameters())

    def loss(parameters, image):
        return torch.func.functional_call(layer, parameters, (image[None],)).square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        torch.testing.assert_close([g[i] for g in found.values()], list(expected))


def test_an_ensemble_of_stacked_layers(kind, x):
    layers = [make(kind) for _ in range(3)]
    with torch.no_grad():
        for i, member in enumerate(layers):
            for p in member.parameters():
                p.mul_(1 + 0.1 * i)
    parameters, buffers = torch.func.stack_module_state(layers)
    base = make(kind).to('meta')

    def call(parameters, buffers, x):
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    out = torch.vmap(call, (0, 0, None))(parameters, buffers, x)
    expected = torch.stack([member(x) for member in layers])
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), list(parameters.values()))
    wanted = torch.autograd.grad(expected.square().sum(), [p for m in layers for p in m.parameters()])
    for i, grad in enumerate(grads):
        torch.testing.assert_close(grad, torch.stack(wanted[i::len(grads)]))
