"""Layers that compute more than their weights say: adapters as peft's are merged, all else is refused by name."""
import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrizations

from lora import MergeableLora
from timm_selfconv.theory import include, merge_heads, prune_heads
from tiny_nets import random_net

KINDS = {
    'quadratic': ('quadratic', ('position',)), 'general': ('quadratic_gen', ('position',)),
    'content': ('learned', ('content', 'content_position'))}
IMAGES = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_net(kind, num_heads=3):
    return random_net(*KINDS[kind], num_heads, std=0.5)


def adapted_pair(kind):
    """A net with adapters and the same net with their sums for weights."""
    net, plain = make_net(kind), make_net(kind)
    for block, same in zip(net.blocks, plain.blocks):
        for name in ('attn.value', 'attn.proj', 'mlp.fc1', 'mlp.fc2'):
            adapter = MergeableLora(block.get_submodule(name))
            block.set_submodule(name, adapter)
            same.get_submodule(name).weight.data = adapter.weight_in_all().detach()
    return net, plain


def assert_same(net, other):
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), other(IMAGES), rtol=0, atol=1e-11)


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_adapters_are_merged(kind, train):
    adapted, plain = adapted_pair(kind)
    state = {key: value.clone() for key, value in adapted.state_dict().items()}
    assert_same(plain, adapted)
    adapted.train(train)
    rich = include(adapted, make_net(kind, num_heads=4))
    assert rich.training == train
    assert_same(rich.eval(), plain)
    assert_same(prune_heads(adapted, {0: [1]}).eval(), prune_heads(plain, {0: [1]}))
    merged, (report,) = merge_heads(adapted, (3, 2), IMAGES)
    wanted, (wanted_report,) = merge_heads(plain, (3, 2), IMAGES)
    torch.testing.assert_close(merged.eval()(IMAGES), wanted(IMAGES), rtol=0, atol=1e-8)
    assert report.dropped == wanted_report.dropped and report.error == pytest.approx(wanted_report.error, rel=1e-7)
    assert all(m.training == train for m in adapted.modules())
    torch.testing.assert_close(adapted.state_dict(), state, rtol=0, atol=0)


class Wrapped(nn.Module):
    """Knows no way to be merged."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x):
        return 2 * self.layer(x)


def doubled(module, args, out):
    return 2 * out


CHANGES = dict(  # what a layer becomes
    wrapped=Wrapped,
    subclassed=lambda layer: type('Doubled', (nn.Linear,), {})(*layer.weight.shape[::-1]).double(),
    parametrized=nn.utils.parametrizations.weight_norm,
    hooked=lambda layer: layer.register_forward_hook(doubled) and layer,
    hooked_before=lambda layer: layer.register_forward_pre_hook(lambda module, args: None) and layer,
    patched=lambda layer: setattr(layer, 'forward', lambda x: x) or layer,
    switched_off=lambda layer: setattr(adapter := MergeableLora(layer), 'on', False) or adapter,
    hooked_inside=lambda layer: layer.register_forward_hook(doubled) and MergeableLora(layer))


@pytest.mark.parametrize('part', ['value', 'proj'])
@pytest.mark.parametrize('change', CHANGES)
def test_what_cannot_be_merged_is_named(change, part):
    net = make_net('quadratic')
    attn = net.blocks[1].attn
    setattr(attn, part, CHANGES[change](getattr(attn, part)))
    for use in (lambda: include(net, make_net('quadratic')), lambda: prune_heads(net, {0: [1]}),
                lambda: merge_heads(net, (2, 2), IMAGES)):
        with pytest.raises(ValueError, match=rf'^blocks\.1\.attn\.{part}=(\w+): '):
            use()


@pytest.mark.parametrize('name', ['', 'stem', 'head', 'blocks.0', 'blocks.0.attn', 'blocks.0.mlp.fc1', 'blocks.1'])
def test_hooks_anywhere_would_be_lost_in_a_richer_net(name):
    net = make_net('quadratic')
    net.get_submodule(name).register_forward_hook(doubled)
    with pytest.raises(ValueError, match=rf"^{name or 'model'}=\w+: computes more than its weights say"):
        include(net, make_net('general'))


def test_wrappers_elsewhere_are_named():
    net = make_net('quadratic')
    net.blocks[1].mlp.fc1 = Wrapped(net.blocks[1].mlp.fc1)
    with pytest.raises(ValueError, match=r'^blocks\.1\.mlp\.fc1=Wrapped: computes more'):
        include(net, make_net('general'))
    assert prune_heads(net, {0: [1]}).blocks[1].mlp.fc1.weight.shape == (12, 8)  # it stays as it is
    net = make_net('quadratic')
    net.stem = Wrapped(net.stem)
    with pytest.raises(ValueError, match=r'its stem is .*Conv2d.*, needs .*Wrapped'):
        include(net, make_net('general'))
