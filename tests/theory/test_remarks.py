"""Other sufficient sets of heads from the paper's slides, and Theorem 1 with two dimensions, against closed forms."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from head_maps import shift_maps
from timm_selfconv.theory import at_taps, conv_residual, interior, line_maps, offset_numbers, tap_offsets

GRID = 9  # no window around the middle reaches the border


def axis_maps(profile):
    """Return maps of three heads of one profile around -1, 0 and 1 along an axis, shape (heads, H, H)."""
    reach = len(profile) // 2
    maps = torch.zeros(3, GRID, GRID, dtype=torch.double)
    for head in range(3):
        for query in range(GRID):
            for offset, share in zip(range(head - 1 - reach, head + reach), profile, strict=True):
                if 0 <= query + offset < GRID:
                    maps[head, query, query + offset] = share
    return maps / maps.sum(-1, keepdim=True)


def residual_of(profile):
    """Return the residual of nine heads with a separable profile to a 3 x 3 kernel, far from borders."""
    axis = axis_maps(profile)
    maps = torch.einsum('aik,bjl->abijkl', axis, axis).flatten(0, 1)
    far = interior(conv_residual(maps, 3).per_query, 7)
    assert far.max() - far.min() < 1e-12
    return float(far.mean())


def closed_form(profile):
    """Return 1 - p^2, where p is the mean squared projection of three taps of an axis on the span of the profiles."""
    size = len(profile) + 2
    shifted = torch.stack([torch.roll(torch.tensor([*profile, 0., 0.]).double(), i) for i in range(3)])
    kept = (torch.linalg.pinv(shifted) @ shifted).diagonal()[size // 2 - 1:size // 2 + 2]
    return 1 - float(kept.mean()) ** 2


def test_windows_of_radius_1_do_not_suffice():
    """By hand: the Gram matrix ((3, 2, 1), (2, 3, 2), (1, 2, 3)) keeps 5/8, 1/2 and 5/8 of the taps of an axis."""
    assert residual_of([1 / 3] * 3) == pytest.approx(1 - (7 / 12) ** 2) == pytest.approx(closed_form([1 / 3] * 3))


@pytest.mark.parametrize('sigma,published', [(0.25, 0.000), (0.5, 0.025), (1., 0.560)])
def test_gaussians_of_equal_width_suffice_the_better_the_narrower(sigma, published):
    profile = (-0.5 * (torch.arange(-2., 3.) / sigma).square()).double().softmax(-1).tolist()  # to two pixels
    assert residual_of(profile) == pytest.approx(closed_form(profile))
    assert closed_form(profile) == pytest.approx(published, abs=5e-4)


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
