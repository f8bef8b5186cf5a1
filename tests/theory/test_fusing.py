"""Fused nets against the original nets."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from hypothesis import given, settings, strategies as st

from lora import Lora
from timm_selfconv import fuse
from timm_selfconv.theory import conv_to_attention, include, prune_heads, reparameterizable
from tiny_nets import EVERY_KIND, noise, random_net


def small(name='sa_quadratic_cifar', **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**dict(embed_dim=8, mlp_dim=8, depth=2), **kwargs}).eval()


def assert_same(fused, model, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


KINDS = [
    *(dict(encoding=encoding, terms=terms) for encoding, terms in EVERY_KIND),
    dict(num_heads=(3, 2)), dict(hierarchical=True, attn_proj=False),
    dict(encoding='learned', terms=('content', 'content_position'), hierarchical=True)]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(KINDS))
def test_logits_are_the_nets(kwargs):
    model = random_net(**kwargs)
    state = copy.deepcopy(model.state_dict())
    fused = fuse(model)
    for x in (noise(3, 3, 8, 8), *([] if kwargs.get('encoding') == 'absolute' else [noise(3, 3, 4, 6)])):
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-10)
    assert all(isinstance(block.attn.proj, nn.Identity) for block in fused.blocks)
    assert not any(p.requires_grad for p in fused.parameters()) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


def test_half_precision_and_autocast_lose_no_more_than_the_net(images):
    model, x = small(embed_dim=16), images(32, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        half = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
        fused = fuse(model).bfloat16()(x.bfloat16()).float()
        with torch.autocast('cpu', torch.bfloat16):
            cast = fuse(model)(x).float()
    error, *others = [float((out - expected).norm()) for out in (half, fused, cast)]
    assert all(0 < other < 1.5 * error for other in others)


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


def test_errors_name_modules_that_cannot_be_fused():
    with pytest.raises(ValueError, match='model=ResNetCifar: has no SelfAttention2d'):
        fuse(timm.create_model('resnet_tiny_cifar'))


def test_adapters_and_hooks_elsewhere_stay(images):
    """tests/layers/test_parameters.py tests adapters on merged layers, which raise an error."""
    model, x, calls = small('sa_learned_content_cifar'), images(2, 3, 32, 32), []
    model.blocks[0].attn.query = Lora(model.blocks[0].attn.query)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: calls.append(module) or 1.5 * out)
    model.blocks[1].mlp.fc1 = Lora(model.blocks[1].mlp.fc1)
    assert_same(fuse(model), model, x)
    assert len(calls) == 2
