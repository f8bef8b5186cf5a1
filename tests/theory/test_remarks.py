"""Other sufficient sets of heads from the paper's slides, and Theorem 1 with two dimensions, against closed forms."""
import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from head_maps import shift_maps
from timm_selfconv.theory import at_taps, conv_residual, interior, line_maps, offset_numbers, tap_offsets


def gaussian(sigma):
    return (-0.5 * (torch.arange(-2., 3.) / sigma).square()).double().softmax(-1).tolist()  # to two pixels


@pytest.mark.parametrize('profile,published', [
    ([1 / 3] * 3, pytest.approx(1 - (7 / 12) ** 2)),
    (gaussian(0.25), pytest.approx(0.000, abs=5e-4)),
    (gaussian(0.5), pytest.approx(0.025, abs=5e-4)),
    (gaussian(1.), pytest.approx(0.560, abs=5e-4))])
def test_windows_of_radius_1_do_not_suffice_but_narrow_gaussians_do(profile, published):
    """Nine heads with one profile around the taps of a 3 x 3 kernel have the residual 1 - p^2.

    p is the mean squared projection of three taps of an axis on the span of the profiles. By hand for windows: the Gram
    matrix ((3, 2, 1), (2, 3, 2), (1, 2, 3)) keeps 5/8, 1/2 and 5/8 of the taps.
    """
    profiles = torch.stack([torch.roll(torch.tensor([*profile, 0., 0.]).double(), i) for i in range(3)])
    middle = profiles.shape[1] // 2
    kept = (torch.linalg.pinv(profiles) @ profiles).diagonal()[middle - 1:middle + 2]
    residual = 1 - float(kept.mean()) ** 2
    assert residual == published

    offsets = [(0, offset) for offset in range(-middle, middle + 1)]
    axis = torch.einsum('ht,tij->hij', profiles, shift_maps(offsets, 1, 9).squeeze())
    maps = torch.einsum('aik,bjl->abijkl', axis, axis).flatten(0, 1)
    far = interior(conv_residual(maps, 3).per_query, 7)  # no window reaches the border
    torch.testing.assert_close(far, torch.full_like(far, residual), rtol=0, atol=1e-12)


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
@example(46., 16, 16)  # the value in the paper: every shift of a kernel, up to rounding
def test_attention_to_other_keys_is_bounded(alpha, height, width):
    taps = at_taps(line_maps(tap_offsets(3), height, width, alpha), 3)  # (heads, taps, H, W)
    bound = 2 * sum(math.exp(-alpha * n * n) for n in range(1, 60))
    assert (1 - interior(taps[range(9), range(9)], 3) <= bound + 1e-15).all()
