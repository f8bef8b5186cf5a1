"""Layers that compute more than their weights say: adapters as peft's are merged, all else is refused by name."""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrizations
import torch.nn.utils.prune

from timm_selfconv.models import SelfAttentionNet
from timm_selfconv.theory import include, merge_heads, prune_heads

SMALL = dict(img_size=8, embed_dim=8, mlp_dim=12, depth=2, num_heads=3, dtype=torch.float64)
KINDS = {
    'quadratic': ('quadratic', ('position',)), 'general': ('quadratic_gen', ('position',)),
    'content': ('learned', ('content', 'content_position'))}
IMAGES = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ADAPTED = ('attn.value', 'attn.proj', 'mlp.fc1', 'mlp.fc2')


def make_net(kind, **kwargs):
    encoding, terms = KINDS[kind]
    torch.manual_seed(0)
    net = SelfAttentionNet(**dict(SMALL, encoding=encoding, terms=terms, **kwargs))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    return net.eval()


class Lora(nn.Module):
    """A low-rank adapter with the methods of peft's; in training it drops."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Parameter(torch.randn(rank, base_layer.in_features, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(base_layer.out_features, rank, dtype=torch.float64))
        self.merged, self.off = False, False

    def forward(self, x):
        if self.merged or self.off:
            return self.base_layer(x)
        return self.base_layer(x) + F.dropout(x, 0.5, self.training) @ self.a.T @ self.b.T

    def merge(self):
        self.base_layer.weight.data += self.b @ self.a
        self.merged = True

    def get_base_layer(self):
        return self.base_layer


def adapt(net, *names):
    for block in net.blocks:
        for name in names:
            block.set_submodule(name, Lora(block.get_submodule(name)))
    return net.eval()


def by_hand(net, *names):
    """The same net with its adapters merged by the definition."""
    plain = SelfAttentionNet(**dict(SMALL, encoding=net.encoding, terms=net.terms)).eval()
    state = {}
    for key, value in net.state_dict().items():
        owner = key.rpartition('.')[0].removesuffix('.base_layer')
        if isinstance(net.get_submodule(owner), Lora):
            if key.endswith('.base_layer.weight'):
                state[f'{owner}.weight'] = value + net.get_submodule(owner).b @ net.get_submodule(owner).a
            elif key.endswith('.base_layer.bias'):
                state[f'{owner}.bias'] = value
        else:
            state[key] = value
    plain.load_state_dict(state)
    return plain


@pytest.fixture(params=KINDS)
def adapted(request):
    net = adapt(make_net(request.param), *ADAPTED)
    net.encoding, net.terms = KINDS[request.param]
    return net


def assert_same(net, other):
    with torch.no_grad():
        torch.testing.assert_close(net(IMAGES), other(IMAGES), rtol=0, atol=1e-11)


@pytest.mark.parametrize('train', [False, True])
def test_adapters_are_merged(adapted, train):
    state = {key: value.clone() for key, value in adapted.state_dict().items()}
    plain = by_hand(adapted)
    assert_same(plain, adapted)
    adapted.train(train)
    richer = SelfAttentionNet(**dict(SMALL, encoding=adapted.encoding, terms=adapted.terms, num_heads=4))
    rich = include(adapted, richer)
    assert rich.training == train
    assert_same(rich.eval(), plain)
    assert_same(prune_heads(adapted, {0: [1]}).eval(), prune_heads(plain, {0: [1]}))
    merged, (report,) = merge_heads(adapted, (3, 2), IMAGES)
    wanted, (wanted_report,) = merge_heads(plain, (3, 2), IMAGES)
    torch.testing.assert_close(merged.eval()(IMAGES), wanted(IMAGES), rtol=0, atol=1e-8)
    assert report.dropped == wanted_report.dropped and report.error == pytest.approx(wanted_report.error, rel=1e-7)
    assert adapted.training == train and all(m.training == train for m in adapted.modules())
    assert adapted.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in adapted.state_dict().items())


class Wrapped(nn.Module):
    """Knows no way to be merged."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x):
        return 2 * self.layer(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def wrap(attn, name):
    setattr(attn, name, Wrapped(getattr(attn, name)))


def subclass(attn, name):
    getattr(attn, name).__class__ = Doubled


def parametrize(attn, name):
    nn.utils.parametrizations.weight_norm(getattr(attn, name))


def prune(attn, name):
    nn.utils.prune.l1_unstructured(getattr(attn, name), 'weight', 0.5)


def hook(attn, name):
    getattr(attn, name).register_forward_hook(lambda module, args, out: 2 * out)


def hook_before(attn, name):
    getattr(attn, name).register_forward_pre_hook(lambda module, args: (2 * args[0],))


def patch(attn, name):
    getattr(attn, name).forward = lambda x: 2 * x


def switch_off(attn, name):
    adapter = Lora(getattr(attn, name))
    adapter.off = True
    setattr(attn, name, adapter)


def hook_inside(attn, name):
    hook(attn, name)
    setattr(attn, name, Lora(getattr(attn, name)))


@pytest.mark.parametrize('part', ['value', 'proj'])
@pytest.mark.parametrize('change', [
    wrap, subclass, parametrize, prune, hook, hook_before, patch, switch_off, hook_inside], ids=lambda f: f.__name__)
@pytest.mark.parametrize('kind', ['quadratic', 'content'])
def test_what_cannot_be_merged_is_named(kind, change, part):
    net = make_net(kind)
    change(net.blocks[1].attn, part)
    net.eval()
    with torch.no_grad():
        before = net(IMAGES) if change is not patch else None
    for use in (lambda: include(net, make_net(kind)), lambda: prune_heads(net, {0: [1]}),
                lambda: merge_heads(net, (2, 2), IMAGES)):
        with pytest.raises(ValueError, match=rf'^blocks\.1\.attn\.{part}=(\w+): '):
            use()
    with torch.no_grad():
        assert before is None or torch.equal(net(IMAGES), before)


@pytest.mark.parametrize('name', ['', 'stem', 'head', 'blocks.0', 'blocks.0.attn', 'blocks.0.mlp.fc1', 'blocks.1'])
def test_hooks_anywhere_would_be_lost_in_a_richer_net(name):
    net = make_net('quadratic')
    net.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match=rf"^{name or 'model'}=\w+: computes more than its weights say"):
        include(net, make_net('general'))


def test_wrappers_elsewhere_are_named():
    for layer in range(2):
        net = make_net('quadratic')
        net.blocks[layer].mlp.fc1 = Wrapped(net.blocks[layer].mlp.fc1)
        with pytest.raises(ValueError, match=rf'^blocks\.{layer}\.mlp\.fc1=Wrapped: computes more'):
            include(net, make_net('general'))
        assert prune_heads(net, {0: [1]}).blocks[layer].mlp.fc1.weight.shape == (12, 8)  # it stays as it is
    net = make_net('quadratic')
    net.stem = Wrapped(net.stem)
    with pytest.raises(ValueError, match=r'its stem is .*Conv2d.*, needs .*Wrapped'):
        include(net, make_net('general'))
