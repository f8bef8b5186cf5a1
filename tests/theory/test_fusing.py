"""Fused nets against the nets that they are made of."""
import copy

import pytest
import timm
import torch
import torch.nn as nn

from lora import Lora, MergeableLora
from timm_selfconv import fuse
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.theory import conv_to_attention, include, prune_heads, reparameterizable

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)


def small(name='sa_quadratic_cifar', **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
    with torch.no_grad():  # narrow heads, wide heads, heads that look past the border
        for m in model.modules():
            if getattr(m, 'spreads', None) is not None and m.spreads.dim() == 1:
                m.spreads.copy_(torch.logspace(-2, 0.5, len(m.spreads)))
    return model


def assert_same(fused, model, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_quadratic_cifar', {}),
    ('sa_quadratic_cifar', dict(hierarchical=True, attn_proj=False)),
    ('sa_quadratic_gen_pruned_cifar', dict(num_heads=(3, 2))),
    ('sa_learned_cifar', {}),
    ('sa_learned_content_cifar', {}),
    ('sa_learned_content_hier_cifar', {}),
    ('sa_quadratic_cifar', dict(terms=('content', 'content_position', 'key_bias', 'position'))),
    ('sa_quadratic_cifar', dict(encoding='sinusoid', terms=('content',))),
])
def test_logits_are_the_nets(name, kwargs, images):
    model = small(name, **kwargs)
    state = copy.deepcopy(model.state_dict())
    x = images(3, 3, 32, 32)
    fused = fuse(model)
    assert_same(fused, model, x)
    assert all(isinstance(m.proj, nn.Identity) for m in fused.modules() if isinstance(m, SelfAttention2d))
    assert not any(p.requires_grad for p in fused.parameters()) and all(p.requires_grad for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_sizes_dtypes_and_rounded_weights(images):
    model = small()
    fused = fuse(model)
    for size in ((32, 32), (16, 24), (32, 32)):
        assert_same(fused, model, images(2, 3, *size))
    fresh = fuse(model).bfloat16().float()  # rounded: another net
    assert_same(fused.bfloat16().float(), fresh, images(2, 3, 32, 32))
    with torch.no_grad():
        assert (fresh(images(2, 3, 32, 32)) - model(images(2, 3, 32, 32))).abs().max() > 1e-4
    assert_same(fused.double(), fresh.double(), images(2, 3, 32, 32).double())

    learned = small('sa_learned_cifar')
    fused = fuse(learned)
    fused(images(1, 3, 16, 16))
    for net in (learned, fused):
        net.set_input_size(img_size=48)
    assert_same(fused, learned, images(1, 3, 16, 16))
    with pytest.raises(ValueError, match='reaches 24'):
        fused(images(1, 3, 64, 64))


def test_half_precision_and_autocast_lose_no_more_than_the_net(images):
    model = small(embed_dim=16)
    x = images(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        half = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
        fused = fuse(model).bfloat16()(x.bfloat16()).float()
        with torch.autocast('cpu', torch.bfloat16):
            cast = fuse(model)(x).float()
    error = (half - expected).abs().max()
    assert 0 < (fused - expected).abs().max() < 2 * error and 0 < (cast - expected).abs().max() < 2 * error


def test_gradients_of_images(images):
    model, grads = small(), []
    for net in (model, fuse(model)):
        x = images(2, 3, 32, 32).requires_grad_()
        net(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


def test_inference_mode_leaves_nothing_that_autograd_cannot_use(images):
    fused = fuse(small())
    with torch.inference_mode():
        fused(images(1, 3, 32, 32))
    x = images(1, 3, 32, 32).requires_grad_()
    fused(x).sum().backward()
    assert x.grad is not None


def test_features_and_what_theory_made(images):
    x = images(2, 3, 32, 32)
    backbone = small(features_only=True, out_indices=(0, 1))
    assert_same(fuse(backbone), backbone, x)
    model = small()
    for net in (prune_heads(model, {0: [0, 4], 1: [1]}), include(model, 'sa_learned_cifar'), reparameterizable(model)):
        assert_same(fuse(net), net, x)
    half = copy.deepcopy(model)
    half.stem = conv_to_attention(half.stem)
    assert_same(fuse(half), half, x)
    layer = model.blocks[0].attn
    assert_same(fuse(layer), layer, images(2, 5, 6, 8))


def test_what_cannot_be_fused_is_said():
    with pytest.raises(ValueError, match='model=ResNetCifar: has no SelfAttention2d'):
        fuse(timm.create_model('resnet_tiny_cifar'))


def test_positions_are_never_those_of_before(images):
    model, changed, x = small(), small(), images(2, 3, 32, 32)
    with torch.no_grad():
        for block in changed.blocks:
            block.attn.encoding.centers.add_(1.)
        fused, other = fuse(model), fuse(changed)
        before, wanted = fused(x), changed(x)
        assert (before - wanted).abs().max() > 1e-3
        called = torch.func.functional_call(fused, dict(other.named_parameters()), (x,))
        torch.testing.assert_close(called, wanted, rtol=1e-4, atol=1e-5)
        assert_same(fused, model, x)
        fused.load_state_dict(other.state_dict())
        assert_same(fused, changed, x)


@pytest.mark.parametrize('name', ['value', 'proj'])
def test_what_is_folded_must_say_all_of_itself(name):
    """See test_adapters.py for all that is refused."""
    model = small()
    setattr(model.blocks[1].attn, name, Lora(getattr(model.blocks[1].attn, name)))
    with pytest.raises(ValueError, match=rf'blocks\.1\.attn\.{name}=.*: computes more than its weights say'):
        fuse(model)


@pytest.mark.parametrize('net', ['sa_quadratic_cifar', 'sa_learned_content_cifar'])
def test_adapters_that_merge_are_merged_and_all_others_stay(net, images):
    model, x, calls = small(net), images(2, 3, 32, 32), []
    attn = model.blocks[0].attn
    for name in ('value', 'proj'):
        setattr(attn, name, MergeableLora(getattr(attn, name)))
    if attn.query is not None:
        attn.query = Lora(attn.query)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: calls.append(module) or 1.5 * out)
    model.blocks[1].mlp.fc1 = Lora(model.blocks[1].mlp.fc1)
    assert_same(fuse(model), model, x)
    assert len(calls) == 2 and attn.value.on
