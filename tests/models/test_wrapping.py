"""Modules and parameters that others put in the place of a net's own: adapters, averages, other tensors for a call."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from timm.utils import ModelEmaV3
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from tiny_nets import SHALLOW


def net(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **SHALLOW[name], img_size=16).double().eval()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, 1., 0.3)
    return model


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Lora(nn.Module):
    """A linear map or 1x1 convolution and what two small ones add to it, as peft's."""

    def __init__(self, base):
        super().__init__()
        conv = isinstance(base, nn.Conv2d)
        rows, cols = base.weight.shape[:2]
        self.base = base
        self.down = nn.Conv2d(cols, 2, 1, bias=False) if conv else nn.Linear(cols, 2, bias=False)
        self.up = nn.Conv2d(2, rows, 1, bias=False) if conv else nn.Linear(2, rows, bias=False)
        self.double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def weight_in_all(self):
        return self.base.weight + (self.up.weight.flatten(1) @ self.down.weight.flatten(1)).view_as(self.base.weight)


def adaptable(module):
    return isinstance(module, nn.Linear) or (
        isinstance(module, nn.Conv2d) and (*module.kernel_size, *module.stride) == (1, 1, 1, 1))


@pytest.mark.parametrize('name', SHALLOW)
def test_adapters_on_every_linear_map(name):
    """Logits and gradients are those of the net whose weights hold what the adapters add."""
    plain, model, x = net(name), net(name), images()
    adapters = {n: Lora(module) for n, module in model.named_modules() if adaptable(module)}
    for n, adapter in adapters.items():
        model.set_submodule(n, adapter)
        plain.get_submodule(n).weight.data = adapter.weight_in_all().detach()
    assert adapters
    wanted = plain(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)
    logits = model(x)
    torch.testing.assert_close(logits, wanted)
    logits.square().sum().backward()
    wanted.square().sum().backward()
    for n, adapter in adapters.items():
        small = adapter.up.weight, adapter.down.weight, adapter.base.weight
        in_all = torch.autograd.grad(adapter.weight_in_all(), small, plain.get_submodule(n).weight.grad)
        torch.testing.assert_close([p.grad for p in small], list(in_all))


@pytest.mark.parametrize('name', SHALLOW)
@pytest.mark.parametrize('training', [True, False])
def test_parameters_for_one_call(name, training):
    """Logits, and gradients by torch.func."""
    model, other, x = net(name), net(name), images()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1).add_(0.01)
    params = {n: p.detach() for n, p in other.named_parameters()}
    before = model(x)
    with torch.no_grad():
        torch.testing.assert_close(functional_call(model, params, (x,)), other(x))
    torch.testing.assert_close(model(x), before)

    model.train(training), other.train(training)

    def loss(params):  # which may change no statistics but its own
        state = {**params, **{n: b.clone() for n, b in other.named_buffers()}}
        return functional_call(model, state, (x,)).square().sum()

    found = torch.func.grad(loss)(params)
    wanted = torch.autograd.grad(other(x).square().sum(), list(other.parameters()))
    torch.testing.assert_close(list(found.values()), list(wanted))


@pytest.mark.parametrize('name', SHALLOW)
def test_averages_of_weights(name):
    """timm's EMA at a decay of 1/2 and torch's mean of two nets: both are the net half way, again after a step."""
    model, x = net(name), images()
    ema, mean = ModelEmaV3(model, decay=0.5), AveragedModel(model, use_buffers=True)
    mean.update_parameters(model)
    with torch.no_grad():
        ema(x), mean(x)
    start = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2).add_(0.01)
    ema.update(model)
    mean.update_parameters(model)
    half = copy.deepcopy(model)
    with torch.no_grad():
        for p, first in zip(half.parameters(), start.parameters()):
            p.add_(first).div_(2)
        for average in (ema, mean):
            torch.testing.assert_close(average(x), half(x))
