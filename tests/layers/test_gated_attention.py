import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from timm.models.convit import GPSA

from head_maps import convit_position_maps
from held import Memory
from timm_selfconv.layers import GatedAttention
from timm_selfconv.layers.functional import maps_of_factors
from tiny_nets import randomised

sides = st.integers(1, 6)


def random_layer(height, width, heads=2, bias=True, seed=0):
    layer = GPSA(3 * heads, heads, qkv_bias=bias, dtype=torch.float64)
    return randomised(GatedAttention(layer, (height, width)), seed, std=1.)


def dense(layer, x):
    """Compute the formula of the layer: each head's map is the gated sum of two softmaxes."""
    position, out = convit_position_maps(layer.pos_proj.weight, *layer.grid_size), []
    query, key, value = (part.chunk(layer.num_heads, -1) for part in (*layer.qk(x).chunk(2, -1), layer.v(x)))
    for h, gate in enumerate(layer.gating_param.sigmoid()):
        content = (query[h] @ key[h].transpose(1, 2) / 3 ** 0.5).softmax(-1)
        out.append(((1 - gate) * content + gate * position[h]) @ value[h])
    return layer.proj(torch.cat(out, -1))


@settings(deadline=None, max_examples=40)
@given(
    sides, sides, st.lists(st.sampled_from([0., 1., -1e4, 1e4, -math.inf, math.inf]), min_size=1, max_size=3),
    st.booleans(), st.integers(0, 99), st.sampled_from([1., 20.]))
def test_the_layer_is_its_formula(height, width, gates, bias, seed, sharpness):
    """And its gradients, with gates that are open, shut or half open, near and far centres, sharp and flat heads."""
    layer = random_layer(height, width, len(gates), bias, seed)
    layer.gating_param.data.copy_(torch.tensor(gates))
    layer.pos_proj.weight.data *= sharpness
    x = torch.randn(2, height * width, 3 * len(gates), dtype=torch.float64)
    expected, maps = dense(layer, x), convit_position_maps(layer.pos_proj.weight, height, width)
    torch.testing.assert_close(maps_of_factors(*layer.factors())[0], maps, rtol=1e-9, atol=1e-12)
    # the bias of positions has no effect
    parameters = [p for name, p in layer.named_parameters() if name != 'pos_proj.bias']
    for fused in (True, False):
        layer.fused_attn = fused
        out = layer(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(
            torch.autograd.grad(o.square().sum(), parameters, retain_graph=True) for o in (out, expected)))


def test_no_map_of_all_queries_and_keys_is_made_forward_or_backward():
    layer, x = random_layer(16, 12).float(), torch.randn(1, 192, 6, requires_grad=True)
    with Memory() as memory:
        layer(x).sum().backward()
    assert memory.largest < 192 * 192 / 2


def test_half_precision_keeps_offsets():
    layer = random_layer(1, 300).float()
    layer.pos_proj.weight.data.copy_(torch.tensor([[512., 0., -1.], [-512., 0., -1.]]))  # peaks 256 columns away
    _, cols = layer.bfloat16().factors()
    assert cols.dtype == torch.float32 and cols[0, 21].argmax() == 277 and cols[1, 299].argmax() == 43


def test_tokens_must_fill_the_grid():
    with pytest.raises(ValueError, match=r'x of shape \[1, 11, 6\]: needs 3 x 4 tokens'):
        random_layer(3, 4)(torch.zeros(1, 11, 6, dtype=torch.float64))
