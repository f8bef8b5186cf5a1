import math

import pytest
import torch

from timm_selfconv.layers import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding


def test_initial_centres_and_spreads_follow_the_released_code():
    torch.manual_seed(0)
    encoding = QuadraticEncoding(20000, 4)
    assert encoding.centers.std().item() == pytest.approx(2., rel=0.03)
    assert encoding.spreads.mean().item() == pytest.approx(1., abs=1e-3)
    assert encoding.spreads.std().item() == pytest.approx(0.01, rel=0.03)
    full = QuadraticEncoding(20000, 4, full=True)
    torch.testing.assert_close(full.spreads.mean(0), torch.eye(2), rtol=0, atol=1e-3)


def test_learned_encoding_needs_halves_for_queries():
    with pytest.raises(ValueError, match=r'dim=5.*even'):
        LearnedEncoding(2, 5, (4, 4), content_position=True)


def test_sinusoids_are_those_of_vaswani_in_each_half():
    encoding = AbsoluteEncoding(16, (3, 5), learned=False, dtype=torch.float64)
    vectors = encoding(torch.zeros(1, 3, 5, 16))[0]
    for row in range(3):
        for col in range(5):
            for half, position in ((vectors[row, col, :8], row), (vectors[row, col, 8:], col)):
                angles = [position / 10000 ** (i / 4) for i in range(4)]
                expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
                torch.testing.assert_close(half, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_absolute_encodings_check_their_size():
    with pytest.raises(ValueError, match=r'dim=6.*multiple of 4'):
        AbsoluteEncoding(6, (4, 4), learned=False)
    learned = AbsoluteEncoding(6, (4, 4))
    with pytest.raises(ValueError, match=r'4 x 5 positions.*4 x 4.*set_input_size'):
        learned(torch.zeros(1, 4, 5, 6))
    learned.set_grid_size((4, 5))
    assert learned(torch.zeros(1, 4, 5, 6)).shape == (1, 4, 5, 6)
