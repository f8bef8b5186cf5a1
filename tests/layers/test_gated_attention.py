"""Gated attention against its formula for every query and key in float64."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from timm.models.convit import GPSA

from head_maps import convit_position_maps
from held import LargestTensor
from timm_selfconv.layers import GatedAttention

sides = st.integers(1, 6)


def random_layer(height, width, heads=2, dim=6, bias=True, gates=None, seed=0):
    torch.manual_seed(seed)
    layer = GPSA(dim, heads, qkv_bias=bias, dtype=torch.float64)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    if gates is not None:
        layer.gating_param.data.copy_(torch.tensor(gates))
    return GatedAttention(layer, (height, width)).eval()


def dense(layer, x):
    """Compute the formula of the layer: each head's map is the gated sum of two softmaxes."""
    position, out = convit_position_maps(layer.pos_proj.weight, *layer.grid_size), []
    query, key = layer.qk(x).chunk(2, -1)
    value, width = layer.v(x), x.shape[2] // layer.num_heads
    for h, gate in enumerate(layer.gating_param.sigmoid()):
        own = slice(h * width, (h + 1) * width)
        content = (query[..., own] @ key[..., own].transpose(1, 2) / width ** 0.5).softmax(-1)
        out.append(((1 - gate) * content + gate * position[h]) @ value[..., own])
    return layer.proj(torch.cat(out, -1))


@settings(deadline=None, max_examples=25)
@given(sides, sides, st.lists(st.tuples(*[st.floats(-20, 20)] * 3), min_size=1, max_size=3))
def test_the_positional_softmax_is_a_product_of_two(height, width, weight):
    """For near and far centres, sharp and flat heads, and c > 0, which moves attention to the corners."""
    layer, weight = random_layer(height, width, len(weight)), torch.tensor(weight, dtype=torch.float64)
    layer.pos_proj.weight.data = weight
    rows, cols = layer.factors()
    torch.testing.assert_close(torch.stack([torch.kron(r, c) for r, c in zip(rows, cols)]),
                               convit_position_maps(weight, height, width), rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(
    sides, sides, st.lists(st.sampled_from([0., 1., -1e4, 1e4, -math.inf, math.inf]), min_size=1, max_size=3),
    st.booleans(), st.integers(0, 99))
def test_the_layer_is_its_formula(height, width, gates, bias, seed):
    """With open, closed and half-open gates."""
    heads = len(gates)
    layer = random_layer(height, width, heads, 6 * heads, bias, gates, seed)
    x = torch.randn(2, height * width, 6 * heads, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(layer, x))
    layer.fused_attn, seen = False, []
    layer.attn_drop.register_forward_hook(lambda _, args, out: seen.append(out))
    torch.testing.assert_close(layer(x), dense(layer, x))
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, heads, height * width, dtype=torch.float64))


def test_gradients_equal_the_formula():
    layer = random_layer(3, 4)
    x = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    inputs = [x, *(p for p in layer.parameters() if p is not layer.pos_proj.bias)]
    for p, grad in zip(inputs, torch.autograd.grad(dense(layer, x).square().sum(), inputs)):
        torch.testing.assert_close(p.grad, grad)
    assert float(layer.pos_proj.bias.grad.abs().max()) < 1e-12


def test_no_map_of_all_queries_and_keys_is_made_forward_or_backward():
    layer = random_layer(16, 12).float()
    with LargestTensor() as largest:
        layer(torch.randn(1, 192, 6, requires_grad=True)).sum().backward()
    assert largest.numel < 192 * 192 / 2
    layer.fused_attn = False
    with LargestTensor() as largest:
        layer(torch.randn(1, 192, 6))
    assert largest.numel >= 2 * 192 * 192


def test_half_precision_keeps_offsets():
    layer = random_layer(1, 300).float()
    layer.pos_proj.weight.data.copy_(torch.tensor([[512., 0., -1.], [-512., 0., -1.]]))  # peaks 256 columns away
    _, cols = layer.bfloat16().factors()
    assert cols.dtype == torch.float32 and cols[0, 21].argmax() == 277 and cols[1, 299].argmax() == 43


def test_tokens_must_fill_the_grid():
    with pytest.raises(ValueError, match=r'x of shape \[1, 11, 6\]: needs 3 x 4 tokens'):
        random_layer(3, 4)(torch.zeros(1, 11, 6, dtype=torch.float64))
