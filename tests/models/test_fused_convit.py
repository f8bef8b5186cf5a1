"""Fused ConViTs against timm's own."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import resample_abs_pos_embed

from timm_selfconv import fuse
from timm_selfconv.models import FusedConVit
from tiny_nets import noise, randomised


def convit(name='convit_tiny', **kwargs):
    """Make a small ConViT with random heads and content, and gates from closed to open."""
    small = dict(img_size=64, embed_dim=8, depth=3, local_up_to_layer=2, num_classes=5)
    model = randomised(timm.create_model(name, **{**small, **kwargs}).double())
    for module in model.modules():
        if hasattr(module, 'gating_param'):
            module.gating_param.data.copy_(torch.linspace(-40., 40., module.num_heads))
    return model


@pytest.mark.parametrize('name,kwargs', [
    ('convit_tiny', {}), ('convit_tiny', dict(qkv_bias=True, global_pool='avg', use_pos_embed=False)),
    ('convit_base', dict(local_up_to_layer=3, embed_dim=4))])
def test_logits_and_gradients_are_timms(name, kwargs):
    model, x = convit(name, **kwargs).train(), noise(2, 3, 64, 64)
    state = copy.deepcopy(model.state_dict())
    fused = copy.deepcopy(fuse(fuse(model)))
    assert type(fused) is FusedConVit and fused.training and all(p.requires_grad for p in fused.parameters())
    torch.testing.assert_close(fused(x), model(x))
    for net in (fused, model):
        net(x).square().sum().backward()
    grads = [{name: p.grad for name, p in net.named_parameters()} for net in (fused, model)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
    for p in fused.parameters():
        p.data.zero_()
    torch.testing.assert_close(model.state_dict(), state)


def test_dropout_drops_the_same_probabilities():
    model, outs = convit(attn_drop_rate=0.3, proj_drop_rate=0.2).train(), []
    for net in (fuse(model), model):
        net.blocks[2].attn.fused_attn = False  # torch's own drops others
        torch.manual_seed(3)
        outs.append(net(noise(2, 3, 64, 64)))
    torch.testing.assert_close(*outs)


def test_another_square_is_timms_net_of_that_size():
    model, larger = convit(), convit(img_size=96)
    state = model.state_dict()
    state['pos_embed'] = resample_abs_pos_embed(state['pos_embed'], [6, 6], [4, 4], num_prefix_tokens=0)
    larger.load_state_dict(state)
    fused = fuse(model)
    fused.set_input_size(96)
    torch.testing.assert_close(fused(noise(2, 3, 96, 96)), larger(noise(2, 3, 96, 96)))
    assert model.patch_embed.img_size == (64, 64) and fused.pos_embed.requires_grad


def test_pictures_need_not_be_square():
    """Heads keep their offsets in patches, so near heads see the left part of a wide picture like a narrow picture."""
    model = convit(local_up_to_layer=3, global_pool='avg', use_pos_embed=False)
    for block in model.blocks:
        block.attn.gating_param.data.fill_(1e4)  # position only
        block.attn.pos_proj.weight.data.copy_(torch.tensor([2., 0., -9e2]).expand(4, 3))
    fused, x = fuse(model), noise(2, 3, 64, 128)
    with pytest.raises(ValueError, match=r'img_size=\(64, 90\): needs a height and a width that are multiples of 16'):
        fused.set_input_size((64, 90))
    fused.set_input_size((64, 128))
    assert timm.models._input.get_model_input_config(fused)['input_size'] == (3, 64, 128)
    grid = fused.forward_intermediates(x, indices=[2], intermediates_only=True)[0]
    expected = [model.forward_intermediates(part, indices=[2], intermediates_only=True)[0] for part in x.chunk(2, -1)]
    torch.testing.assert_close(grid, torch.cat(expected, -1))


def test_hooks_and_parametrizations_are_refused():
    model = convit()
    handle = model.blocks[1].attn.register_forward_hook(print)
    with pytest.raises(ValueError, match=r'blocks\.1\.attn is a GPSA with hooks'):
        fuse(model)
    handle.remove()
    nn.utils.parametrize.register_parametrization(model.blocks[0].attn.pos_proj, 'weight', nn.Identity())
    with pytest.raises(ValueError, match=r'blocks\.0\.attn\.pos_proj is a Parametrized'):
        fuse(model)
