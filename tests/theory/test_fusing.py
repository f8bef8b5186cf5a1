"""Fused nets against the original nets."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from hypothesis import given, settings, strategies as st
from timm.models import reparameterize_model

from lora import Lora
from timm_selfconv import fuse
from tiny_nets import EVERY_KIND, noise, random_net

KINDS = [
    *(dict(encoding=encoding, terms=terms) for encoding, terms in EVERY_KIND),
    dict(num_heads=(3, 2)), dict(hierarchical=True, attn_proj=False),
    dict(encoding='learned', terms=('content', 'content_position'), hierarchical=True)]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(KINDS))
def test_logits_are_the_nets(kwargs):
    model, x = random_net(**kwargs), noise(3, 3, 8, 8)
    state = copy.deepcopy(model.state_dict())
    fused = fuse(model)
    for net in (fused, reparameterize_model(model)):
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-10)
        assert all(isinstance(block.attn.proj, nn.Identity) for block in net.blocks)
    assert not any(p.requires_grad for p in fused.parameters()) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


def test_layers_and_nets_for_features(small_net, images):
    backbone, x = small_net('sa_quadratic_cifar', features_only=True, out_indices=(0, 1)).eval(), images(2, 3, 32, 32)
    torch.testing.assert_close(fuse(backbone)(x), backbone(x), rtol=1e-4, atol=1e-5)
    layer, grid = random_net().blocks[0].attn, noise(2, 5, 6, 8)
    torch.testing.assert_close(fuse(layer)(grid), layer(grid))
    with pytest.raises(ValueError, match='model=ResNetCifar: has no SelfAttention2d'):
        fuse(timm.create_model('resnet_tiny_cifar', device='meta'))


def test_adapters_and_hooks_elsewhere_stay():
    """Merged layers with adapters are refused, see tests/layers/test_parameters.py."""
    model, x, calls = random_net('learned', ('content', 'content_position')), noise(2, 3, 8, 8), []
    model.blocks[0].attn.query = Lora(model.blocks[0].attn.query)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: calls.append(module) or 1.5 * out)
    model.blocks[1].mlp.fc1 = Lora(model.blocks[1].mlp.fc1)
    torch.testing.assert_close(fuse(model)(x), model(x))
    assert len(calls) == 2
