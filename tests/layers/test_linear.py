import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers import Mlp, SelfAttention2d, TokenAttention
from timm_selfconv.layers.linear import apply_linear


class Ours(torch.nn.Module):
    """torch's Linear, called as our layers call theirs."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.layer = torch.nn.Linear(*args, **kwargs)

    def forward(self, x):
        if torch.jit.is_scripting():
            x = self.layer(x)
        else:
            x = apply_linear(self.layer, x)
        return x


def pair(**kwargs):
    """Ours and torch's, with the same parameters."""
    torch.manual_seed(0)
    ours, theirs = Ours(5, 7, **kwargs), torch.nn.Linear(5, 7, **kwargs)
    theirs.load_state_dict(ours.layer.state_dict())
    return ours, theirs


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('shape', [(5,), (3, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5)])
@pytest.mark.parametrize('grad', [True, False])
def test_any_shape_gives_what_torch_gives(shape, bias, dtype, grad):
    """Of any memory layout, too."""
    ours, theirs = pair(bias=bias, dtype=dtype)
    x = torch.randn(*shape, dtype=dtype)
    with torch.set_grad_enabled(grad):
        for y in (x, x.movedim(-1, 0).contiguous().movedim(0, -1)):
            torch.testing.assert_close(ours(y), theirs(y))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast_decides_what_comes_out(dtype):
    ours, theirs = pair()
    x = torch.randn(3, 5)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert ours(x).dtype == dtype
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize('wanted', [('x',), ('weight',), ('bias',), ('x', 'bias'), ('weight', 'bias')])
def test_gradients_of_whichever_is_wanted(wanted):
    ours, theirs = pair()
    x = torch.randn(3, 5, requires_grad='x' in wanted)
    found = []
    for call, layer in ((ours, ours.layer), (theirs, theirs)):
        leaves = dict(x=x, weight=layer.weight, bias=layer.bias)
        for name in ('weight', 'bias'):
            leaves[name].requires_grad_(name in wanted)
        found.append(torch.autograd.grad(call(x).square().sum(), [leaves[name] for name in wanted]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize('grad', [True, False])
def test_parameters_that_are_views_of_others(grad):
    ours, theirs = pair()
    with torch.no_grad():
        weight, bias = theirs.weight.T.contiguous().T, torch.stack([theirs.bias, theirs.bias + 1], 1)[:, 0]
        ours.load_state_dict({'layer.weight': weight, 'layer.bias': bias}, assign=True)
    assert not ours.layer.weight.is_contiguous() and not ours.layer.bias.is_contiguous()
    x = torch.randn(3, 5)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize('grad', [True, False])
@pytest.mark.parametrize('other', [torch.bfloat16, torch.float64])
def test_dtypes_that_differ_are_refused_as_by_torch(other, grad):
    for layer in pair(dtype=other):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match='dtype'):
            layer(torch.randn(3, 5))


def test_hooks_see_the_layer_called():
    ours, _ = pair()
    seen, x = [], torch.randn(3, 5)
    ours.layer.register_full_backward_hook(lambda *args: seen.append('backward'))
    ours(x).sum().backward()
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module)):
        ours(x)
    assert seen == ['backward', ours.layer, ours]


@pytest.mark.parametrize('make,shape,layers', [
    (lambda: SelfAttention2d(8, 2, ('content', 'position')), (2, 3, 3, 8), 4),
    (lambda: TokenAttention(8, 2), (2, 5, 8), 4), (lambda: Mlp(8, 12), (2, 8), 2)])
def test_quantisation_finds_every_linear_layer(make, shape, layers):
    torch.manual_seed(0)
    module = make().eval()
    quantised = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)
    found = [m for m in quantised.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(found) == layers
    x = torch.randn(shape)
    with torch.no_grad():
        out, expected = quantised(x), module(x)
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()


def test_a_wrong_size_is_refused_as_by_torch():
    with torch.no_grad(), pytest.raises(RuntimeError, match='cannot be multiplied'):
        Ours(5, 7)(torch.randn(3, 4))


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
