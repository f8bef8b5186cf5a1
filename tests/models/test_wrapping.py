"""Modules and parameters that replace a net's own: adapters, averages, tensors for one call."""
import pytest
import torch
import torch.nn as nn
from timm.utils import ModelEmaV3
from torch.func import functional_call

from lora import Lora
from tiny_nets import FAMILIES, noise, shallow_net


@pytest.mark.parametrize('name', FAMILIES)
def test_adapters_on_every_linear_map(name):
    """A net with adapters has the logits and gradients of a net with merged weights."""
    plain, model, x = *(shallow_net(name, img_size=16) for _ in range(2)), noise(2, 3, 16, 16)
    adapters = {n: Lora(module) for n, module in model.named_modules()
                if isinstance(module, nn.Linear) or getattr(module, 'kernel_size', None) == (1, 1)}
    for n, adapter in adapters.items():
        model.set_submodule(n, adapter)
        plain.get_submodule(n).weight = nn.Parameter(adapter.weight_in_all().detach())
    logits, wanted = model(x), plain(x)
    torch.testing.assert_close(logits, wanted)
    (logits.square().sum() + wanted.square().sum()).backward()
    for n, adapter in adapters.items():
        in_all = torch.autograd.grad(adapter.weight_in_all(), adapter.a.weight, plain.get_submodule(n).weight.grad)
        torch.testing.assert_close(adapter.a.weight.grad, *in_all)


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_follow_parameters(name):
    """Parameters for one call, or from an average: no layer caches its parameters."""
    model, other, x = *(shallow_net(name, img_size=16) for _ in range(2)), noise(2, 3, 16, 16)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1).add_(0.01)
        before, wanted = model(x), other(x)
        torch.testing.assert_close(functional_call(model, dict(other.named_parameters()), (x,)), wanted)
        torch.testing.assert_close(model(x), before)
        average = ModelEmaV3(model, decay=0.)
        average(x)
        average.update(other)
        torch.testing.assert_close(average(x), wanted)
