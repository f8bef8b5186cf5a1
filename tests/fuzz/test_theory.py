import math

import pytest
import torch
import torch.nn as nn
from hypothesis import given, strategies as st

from timm_selfconv.models import SelfAttentionNet
from timm_selfconv.theory import conv_to_attention, include

CONTENT = ('content', 'content_position')
LADDER = [
    dict(encoding='quadratic'), dict(encoding='learned'), dict(encoding='learned', terms=CONTENT),
    dict(encoding='learned', terms=CONTENT, num_heads=6)]


def make_net(seed, **kwargs):
    torch.manual_seed(seed)
    return SelfAttentionNet(**{
        **dict(embed_dim=12, mlp_dim=8, depth=2, num_heads=4, dtype=torch.float64), **kwargs}).eval()


@given(
    st.integers(0, 2 ** 16), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 2), st.integers(1, 3),
    st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.floats(0, 12)), min_size=4, max_size=4))
@pytest.mark.timeout(3600)
def test_the_ladder_holds_wherever_heads_look(seed, grid, start, steps, heads):
    """From any rung to any above it, heads sharp and flat, near and far outside the grid."""
    img_size = 2 * grid[0], 2 * grid[1]
    net = make_net(seed, img_size=img_size)
    for block in net.blocks:
        centers, spreads = torch.tensor(heads, dtype=torch.float64).split([2, 1], dim=1)
        block.attn.encoding.centers.data, block.attn.encoding.spreads.data = centers, spreads.flatten()
    x = torch.randn(2, 3, *img_size, dtype=torch.float64)
    low = include(net, make_net(seed + 1, img_size=img_size, **LADDER[start]))
    high = include(low, make_net(seed + 2, img_size=img_size, **LADDER[min(start + steps, 3)]))
    with torch.no_grad():
        torch.testing.assert_close(low(x), net(x), rtol=0, atol=1e-8)
        torch.testing.assert_close(high(x), net(x), rtol=0, atol=1e-8)


@given(
    st.integers(0, 2 ** 16), st.floats(-2, 300), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 4),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from(['zeros', 'reflect', 'replicate']))
@pytest.mark.timeout(3600)
def test_a_convolution_is_attention_at_any_alpha(seed, exponent, dtype, height, width, stride, dilation, padding_mode):
    """Lemma 2: other pixels than a head's tap get no more than on an unbounded grid; outputs are always numbers."""
    alpha = 10. ** exponent
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 3, (height, width), stride, padding=1, dilation=dilation, padding_mode=padding_mode).to(dtype)
    x = torch.randn(1, 2, 8, 9, dtype=dtype)
    if alpha > torch.finfo(dtype).max / 4:
        with pytest.raises(ValueError, match=r'alpha=.*needs a positive number'):
            conv_to_attention(conv, alpha)
        return
    with torch.no_grad():
        out, expected = conv_to_attention(conv, alpha)(x), conv(x)
        theta = sum(math.exp(-alpha * n * n) for n in range(-12, 13))
        leak = 1 - theta ** -2
        size = conv.weight.abs().sum(dim=(1, 2, 3)).max() * 2 * x.abs().max()
    assert out.isfinite().all()
    assert (out - expected).abs().max() <= (leak + 40 * torch.finfo(dtype).eps) * size
