"""Compiled layers keep the kernels, and what these keep for the backward pass."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from held import in_groups
from saved import saved_bytes
from timm_selfconv.layers import TERMS, SelfAttention2d, TokenAttention

pytestmark = pytest.mark.slow
LAYERS = {
    'factors': lambda: SelfAttention2d(16, 9, encoding='learned', grid_size=(8, 8)),
    'maps': lambda: SelfAttention2d(16, 9, encoding='quadratic_gen'),
    'content': lambda: SelfAttention2d(16, 3, ('content', 'content_position'), 'learned', grid_size=(8, 8)),
    'all terms': lambda: SelfAttention2d(16, 3, TERMS),
    'tokens': lambda: TokenAttention(16, 3),
}


def compiled(layer):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    return torch.compile(layer, backend=counter, fullgraph=True), counter


def images(layer, batch):
    shape = (batch, 64, 16) if isinstance(layer, TokenAttention) else (batch, 8, 8, 16)
    return torch.randn(shape, requires_grad=True)


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]()


def test_a_step_gives_and_keeps_what_it_does_uncompiled(layer):
    """Of a batch of any size: a second one takes one more compilation, for all."""
    call, counter = compiled(layer)
    for batch in (8, 6, 5):
        x = images(layer, batch)
        wanted = [x, *layer.parameters()]
        with in_groups():
            (kept, out), (expected_kept, expected) = saved_bytes(call, x), saved_bytes(layer, x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted))
        assert kept <= 1.2 * expected_kept
    assert 1 <= counter.frame_count <= 2


def test_eval_of_two_batch_sizes_takes_one_more_compilation(layer):
    call, counter = compiled(layer.eval())
    with torch.no_grad():
        for batch in (4, 6, 5):
            x = images(layer, batch)
            torch.testing.assert_close(call(x), layer(x))
    assert 1 <= counter.frame_count <= 2
