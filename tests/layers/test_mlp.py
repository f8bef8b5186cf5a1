import pytest
import timm.layers
import torch
from torch.utils.flop_counter import FlopCounterMode

from saved import saved_bytes
from timm_selfconv.layers import Mlp


def pair(drop=0., **kwargs):
    """Ours and timm's, with the same parameters."""
    torch.manual_seed(0)
    ours = Mlp(6, 20, drop=drop, **kwargs)
    theirs = timm.layers.Mlp(6, 20, drop=drop, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def step(mlp, x, dtype=None):
    """Output, and gradients of x and of all parameters."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with torch.autocast('cpu', dtype or torch.bfloat16, enabled=dtype is not None):
        out = mlp(x)
    return out, torch.autograd.grad(out.float().square().sum(), [x, *mlp.parameters()])


@pytest.mark.parametrize('dtype', [None, torch.bfloat16])
@pytest.mark.parametrize('drop', [0., 0.5])
@pytest.mark.parametrize('act_layer', [torch.nn.GELU, torch.nn.ReLU])
def test_a_step_gives_what_timms_gives(act_layer, drop, dtype):
    ours, theirs = pair(drop, act_layer=act_layer, norm_layer=torch.nn.LayerNorm)
    x = torch.randn(4, 3, 3, 6)
    torch.testing.assert_close(step(ours, x, dtype), step(theirs, x, dtype), rtol=0, atol=0)


def test_a_step_keeps_its_input_and_its_hidden_channels():
    mlp, _ = pair()
    x = torch.randn(10, 6)
    kept, _ = saved_bytes(mlp, x)
    assert kept == x.nbytes + 10 * 20 * 4


def test_no_product_is_computed_twice():
    flops = []
    for mlp in pair():
        with FlopCounterMode(display=False) as counter:
            mlp(torch.randn(10, 6)).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_second_derivatives():
    mlp = pair()[0].double()
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp, x) and torch.autograd.gradgradcheck(mlp, x)


def test_functional_transforms():
    ours, theirs = (mlp.double() for mlp in pair())
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(torch.func.jacrev(ours))(x), torch.vmap(torch.func.jacrev(theirs))(x))


@pytest.mark.parametrize('name', ['act', 'fc2'])
@pytest.mark.parametrize('register', ['register_forward_hook', 'register_forward_pre_hook'])
def test_who_hooks_a_module_sees_it_called_once(name, register):
    mlp, _ = pair()
    calls = []
    getattr(getattr(mlp, name), register)(lambda *args: calls.append(name))
    step(mlp, torch.randn(4, 6))
    assert calls == [name]


def test_torchscript():
    mlp, _ = pair()
    x = torch.randn(4, 6, requires_grad=True)
    torch.testing.assert_close(torch.jit.script(mlp)(x), mlp(x))
