import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers import Linear


def pair(**kwargs):
    """Ours and torch's, with the same parameters."""
    torch.manual_seed(0)
    ours, theirs = Linear(5, 7, **kwargs), torch.nn.Linear(5, 7, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('shape', [(5,), (3, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5)])
@pytest.mark.parametrize('grad', [True, False])
def test_any_shape_gives_what_torch_gives(shape, bias, dtype, grad):
    ours, theirs = pair(bias=bias, dtype=dtype)
    x = torch.randn(*shape, dtype=dtype)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours(x), theirs(x))


def test_an_input_that_is_not_contiguous():
    ours, theirs = pair()
    x = torch.randn(5, 4, 3).transpose(0, 2)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast_decides_what_comes_out(dtype):
    ours, theirs = pair()
    x = torch.randn(3, 5)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert ours(x).dtype == dtype
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize('frozen', ['x', 'weight'])
def test_gradients_of_whichever_is_wanted(frozen):
    ours, theirs = pair()
    x = torch.randn(3, 5, requires_grad=frozen != 'x')
    for layer in (ours, theirs):
        layer.weight.requires_grad_(frozen != 'weight')
    wanted = 'weight' if frozen == 'x' else 'x'
    found, expected = (
        torch.autograd.grad(layer(x).square().sum(), x if wanted == 'x' else layer.weight) for layer in (ours, theirs))
    torch.testing.assert_close(found, expected)


def test_a_wrong_size_is_refused_as_by_torch():
    with torch.no_grad(), pytest.raises(RuntimeError, match='cannot be multiplied'):
        Linear(5, 7)(torch.randn(3, 4))


def test_counters_see_the_product():
    flops = []
    for layer in pair():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.randn(3, 5))
        flops.append(counter.get_total_flops())
    assert flops == [2 * 3 * 5 * 7] * 2


def test_torchscript_export_and_compile():
    layer, x = pair()[0].requires_grad_(False), torch.randn(3, 5)
    for other in (torch.jit.script(layer), torch.export.export(layer, (x,)).module(), torch.fx.symbolic_trace(layer),
                  torch.compile(layer, backend='aot_eager', fullgraph=True)):
        torch.testing.assert_close(other(x), layer(x))
