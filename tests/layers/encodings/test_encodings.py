import pytest
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import AbsoluteEncoding, QuadraticEncoding
from timm_selfconv.layers.encodings import axis_offsets, gaussian_axis_scores, resample_table


def test_initial_centres_and_spreads_follow_the_released_code():
    torch.manual_seed(0)
    encoding = QuadraticEncoding(20000, 4)
    assert encoding.centers.std().item() == pytest.approx(2., rel=0.03)
    assert encoding.spreads.mean().item() == pytest.approx(1., abs=1e-3)
    assert encoding.spreads.std().item() == pytest.approx(0.01, rel=0.03)
    full = QuadraticEncoding(20000, 4, full=True)
    torch.testing.assert_close(full.spreads.mean(0), torch.eye(2), rtol=0, atol=1e-3)


def test_each_half_has_the_sinusoids_of_vaswani():
    encoding = AbsoluteEncoding(16, (3, 5), learned=False, dtype=torch.float64)
    places = torch.meshgrid(torch.arange(3.), torch.arange(5.), indexing='ij')
    angles = [place[..., None] / torch.tensor([10000 ** (i / 4) for i in range(4)]) for place in places]
    expected = torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], -1)
    torch.testing.assert_close(encoding(torch.zeros(1, 3, 5, 16))[0], expected)


def test_learned_absolute_encodings_check_the_size_of_the_input():
    learned = AbsoluteEncoding(6, (4, 4))
    with pytest.raises(ValueError, match=r'4 x 5 positions.*4 x 4.*set_input_size'):
        learned(torch.zeros(1, 4, 5, 6))
    learned.set_grid_size((4, 5))
    assert learned(torch.zeros(1, 4, 5, 6)).shape == (1, 4, 5, 6)


@given(st.integers(2, 9), st.integers(2, 9))
def test_resampled_tables_keep_ends_middle_and_linear_functions(old, new):
    linear, wanted = (torch.linspace(-1, 1, 2 * n - 1, dtype=torch.float64)[:, None] for n in (old, new))
    torch.testing.assert_close(resample_table(linear, new), wanted)


@settings(deadline=None, max_examples=12)
@given(st.sampled_from([0., 1e-3, 0.03, 1., 30., 1e3]), st.sampled_from([16, 112]))
def test_gaussian_scores_in_float32_are_right_however_far_and_sharp(spread, size):
    centers = torch.cat([torch.randn(40) * size, torch.tensor([3.5, 3.5000002, -0.5, 0., 256., 4096.3, 1e4, -9999.7])])
    probs = gaussian_axis_scores(centers, torch.full_like(centers, spread).square(), size).softmax(-1)
    distance = axis_offsets(size, centers.double()) - centers.double()[:, None, None]
    expected = (-0.5 * torch.tensor(spread).double() ** 2 * distance.square()).softmax(-1)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)


def test_gaussian_scores_are_numbers_for_all_numbers():
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([0., 1e-30, 1e4, 1e20, largest, -largest])
    centers, precision = torch.cartesian_prod(numbers, numbers.abs()).T
    assert gaussian_axis_scores(centers, precision, 5).softmax(-1).isfinite().all()
