import itertools
import math

import torch
from hypothesis import given, settings, strategies as st

from head_maps import shift_maps
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.theory import at_taps, conv_residual, interior, line_maps, offset_numbers, tap_offsets


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_offset_has_a_different_number(height, width):
    offsets = torch.tensor(list(itertools.product(range(1 - height, height), range(1 - width, width))))
    assert len(offset_numbers(offsets, width).unique()) == len(offsets)


def test_two_dimensions_are_every_shift_of_a_kernel():
    """At alpha = 46, the value in the paper, up to rounding."""
    maps = line_maps(tap_offsets(3), 16, 16, alpha=46.)
    exact = shift_maps(tap_offsets(3).tolist(), 16, 16)
    assert interior((maps - exact).abs().amax((-2, -1)), 3).max() < 1e-15
    assert conv_residual(maps, 3).shared < 1e-15


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 20.), st.integers(3, 6), st.integers(3, 7))
def test_attention_to_other_keys_is_bounded(alpha, height, width):
    taps = at_taps(line_maps(tap_offsets(3), height, width, alpha), 3)  # (heads, taps, H, W)
    on_tap = interior(taps[range(9), range(9)], 3)
    bound = 2 * sum(math.exp(-alpha * n * n) for n in range(1, 60))
    assert (1 - on_tap <= bound + 1e-15).all()
    attn = SelfAttention2d(4, 9, dtype=torch.double).requires_grad_(False)  # three dimensions
    attn.encoding.centers.copy_(tap_offsets(3))
    attn.encoding.spreads.fill_((2 * alpha) ** 0.5)
    three = attn.attention_probs(torch.zeros(1, height, width, 4, dtype=torch.double))[0]
    worst = [float((1 - interior(m[range(9), range(9)], 3)).max()) for m in (taps, at_taps(three, 3))]
    assert alpha < 1 or worst[0] <= worst[1] + 1e-15
