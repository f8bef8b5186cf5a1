import math

import torch
from hypothesis import given, settings, strategies as st

from head_maps import shift_maps
from timm_selfconv.theory import at_taps, conv_residual, interior, line_maps, offset_numbers, tap_offsets


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_offset_has_a_number_of_its_own(height, width):
    offsets = torch.cartesian_prod(torch.arange(1 - height, height), torch.arange(1 - width, width))
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
    bound = 2 * sum(math.exp(-alpha * n * n) for n in range(1, 60))
    assert (1 - interior(taps[range(9), range(9)], 3) <= bound + 1e-15).all()
