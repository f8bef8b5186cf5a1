import math

import pytest
import torch
import torch.nn as nn
from hypothesis import given, strategies as st

from timm_selfconv.theory import conv_to_attention

@given(
    st.integers(0, 2 ** 16), st.floats(-2, 300), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 4),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from(['zeros', 'reflect', 'replicate']))
@pytest.mark.timeout(3600)
def test_a_convolution_is_attention_at_any_alpha(seed, exponent, dtype, height, width, stride, dilation, padding_mode):
    """Lemma 2: pixels off the tap get at most as much attention as on an unbounded grid, and outputs are finite."""
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
