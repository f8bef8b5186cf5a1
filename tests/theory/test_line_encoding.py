import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from head_maps import shift_maps
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.models import SelfAttentionNet
from timm_selfconv.theory import at_taps, conv_residual, include, interior, line_maps, offset_numbers, prune_heads, \
    tap_offsets


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_offset_has_a_number_of_its_own(height, width):
    offsets = torch.tensor(list(itertools.product(range(1 - height, height), range(1 - width, width))))
    assert len(offset_numbers(offsets, width).unique()) == len(offsets)


def test_two_dimensions_are_every_shift_of_a_kernel():
    """At alpha = 46, where Theorem 1's three are, too, to rounding."""
    maps = line_maps(tap_offsets(3), 16, 16, alpha=46.)
    exact = shift_maps(tap_offsets(3).tolist(), 16, 16)
    assert interior((maps - exact).abs().amax((-2, -1)), 3).max() < 1e-15
    assert conv_residual(maps, 3).shared < 1e-15


def layer_of_taps(encoding, grid_size, alpha):
    attn = SelfAttention2d(4, 9, encoding=encoding, grid_size=grid_size, dtype=torch.double).requires_grad_(False)
    attn.encoding.centers.copy_(tap_offsets(3))
    attn.encoding.spreads.fill_((2 * alpha) ** 0.5)
    return attn


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 20.), st.integers(3, 6), st.integers(3, 7))
def test_what_other_keys_get(alpha, height, width):
    taps = at_taps(line_maps(tap_offsets(3), height, width, alpha), 3)  # (heads, taps, H, W)
    on_tap = interior(taps[range(9), range(9)], 3)
    bound = 2 * sum(math.exp(-alpha * n * n) for n in range(1, 60))
    assert (1 - on_tap <= bound + 1e-15).all()
    attn = layer_of_taps('quadratic', (height, width), alpha)  # three dimensions
    three = attn.attention_probs(torch.zeros(1, height, width, 4, dtype=torch.double))[0]
    worst = [float((1 - interior(m[range(9), range(9)], 3)).max()) for m in (taps, at_taps(three, 3))]
    assert alpha < 1 or worst[0] <= worst[1] + 1e-15


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 20.), st.integers(3, 5), st.integers(3, 6), st.integers(0, 3))
def test_a_layer_of_two_dimensions(alpha, height, width, more):
    """Its maps are the encoding's, on grids that it was made for, on narrower ones, and after a change of size."""
    attn = layer_of_taps('line', (height, width), alpha)
    x = torch.randn(1, height, width, 4, dtype=torch.double)
    expected = line_maps(tap_offsets(3), height, width, alpha)
    torch.testing.assert_close(attn.attention_probs(x)[0], expected)
    attn.encoding.set_grid_size((height, width + more))
    if alpha > 15:  # wider heads, and those that look beyond the edge, look on in the row beside it
        other = (attn.attention_probs(x)[0] - expected).abs().amax((-2, -1))
        assert interior(other, 3).max() < 1e-6
    attn.encoding.set_grid_size((height, width))
    torch.testing.assert_close(attn.attention_probs(x)[0], expected)


def test_a_line_is_a_general_precision_of_rank_1():
    torch.manual_seed(0)
    kwargs = dict(embed_dim=8, mlp_dim=8, depth=2, num_heads=3, img_size=8, dtype=torch.double)
    net = SelfAttentionNet(encoding='line', **kwargs).eval()
    general = include(net, SelfAttentionNet(encoding='quadratic_gen', **kwargs))
    images = torch.randn(2, 3, 8, 8, dtype=torch.double)
    torch.testing.assert_close(net(images), general(images))
    torch.testing.assert_close(torch.jit.script(net)(images), general(images))
    torch.testing.assert_close(prune_heads(net, {0: [1]})(images), prune_heads(general, {0: [1]})(images))
    gradients = torch.autograd.grad(net(images).sum(), [net.blocks[0].attn.encoding.spreads, net.stem.weight])
    assert all(g.isfinite().all() and g.any() for g in gradients)
    more = include(net, SelfAttentionNet(encoding='line', **{**kwargs, 'num_heads': 5}))
    torch.testing.assert_close(more(images), general(images))
    for source, reason in ((SelfAttentionNet(**kwargs), 'no rung leads to its encoding'), (
            SelfAttentionNet(encoding='line', **{**kwargs, 'img_size': (8, 10)}), 'for another grid')):
        with pytest.raises(ValueError, match=reason):
            include(source, net)


def test_a_line_knows_its_grid():
    net = SelfAttentionNet(encoding='line', embed_dim=8, mlp_dim=8, depth=1, num_heads=2, img_size=8)
    with pytest.raises(ValueError, match="5 columns, but encoding='line' numbers 4"):
        net(torch.randn(1, 3, 8, 10))
    wider = SelfAttentionNet(encoding='line', embed_dim=8, mlp_dim=8, depth=1, num_heads=2, img_size=(8, 10))
    with pytest.raises(RuntimeError, match='col_numbers'):
        wider.load_state_dict(net.state_dict())
    with pytest.raises(ValueError, match="'line' needs 'position' and has no 'content_position'"):
        SelfAttention2d(4, 2, ('content_position',), 'line')
