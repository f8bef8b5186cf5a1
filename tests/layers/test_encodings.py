import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding
from timm_selfconv.layers.axis_scores import precision_matrices

sizes = st.integers(1, 9)


@settings(deadline=None)
@given(sizes, sizes, st.integers(0, 2 ** 16))
def test_full_precision_scores_are_the_gaussian_quadratic_form(height, width, seed):
    torch.manual_seed(seed)
    encoding = QuadraticEncoding(3, 4, full=True, dtype=torch.float64)
    torch.nn.init.normal_(encoding.spreads)
    rows, cols, cross = encoding(None, height, width)
    scores = (rows[..., :, None] + cols[..., None, :] + cross)[0]
    row_table, col_table, coupling = encoding.offset_tables(height, width)
    precision = precision_matrices(encoding.spreads)
    for h, q1, q2 in [(0, 0, 0), (1, height - 1, 0), (2, height // 2, width - 1)]:
        d1, d2 = torch.meshgrid(torch.arange(height) - q1, torch.arange(width) - q2, indexing='ij')
        e = torch.stack([d1, d2], dim=-1) - encoding.centers[h]
        expected = -0.5 * torch.einsum('ija,ab,ijb->ij', e, precision[h], e)
        constant = scores[h, q1, q2] - expected
        torch.testing.assert_close(constant, constant[:1, :1].expand_as(constant))
        tabled = row_table[h, d1 + height - 1] + col_table[h, d2 + width - 1] + coupling[h] * d1 * d2
        constant = tabled - expected
        torch.testing.assert_close(constant, constant[:1, :1].expand_as(constant))


@pytest.mark.parametrize('first,last', [(0, 2), (1, 4), (3, 4)])
def test_some_rows_of_queries_are_those_of_all(first, last):
    for encoding in (QuadraticEncoding(2, 6, full=True, content_position=True),
                     QuadraticEncoding(2, 6), LearnedEncoding(2, 6, (4, 5), content_position=True)):
        query = torch.randn(3, 2, 4, 5, 6)
        some, whole = encoding(query[:, :, first:last], 4, 5, first, last), encoding(query, 4, 5)
        for a, b in zip(some, whole):
            if b is not None:
                torch.testing.assert_close(a, b[:, :, first:last] if b.shape[2] == 4 else b)


def test_initial_centres_and_spreads_follow_the_released_code():
    torch.manual_seed(0)
    encoding = QuadraticEncoding(20000, 4)
    assert encoding.centers.std().item() == pytest.approx(2., rel=0.03)
    assert encoding.spreads.mean().item() == pytest.approx(1., abs=1e-3)
    assert encoding.spreads.std().item() == pytest.approx(0.01, rel=0.03)
    full = QuadraticEncoding(20000, 4, full=True)
    torch.testing.assert_close(full.spreads.mean(0), torch.eye(2), rtol=0, atol=1e-3)


def test_learned_encoding_resamples_both_tables_for_another_grid():
    encoding = LearnedEncoding(2, 6, (4, 4))
    encoding.set_grid_size((8, 3))
    assert encoding.row_table.shape == (15, 6) and encoding.col_table.shape == (5, 6)
    rows, cols, _ = encoding(None, 8, 3)
    assert rows.shape == (1, 2, 8, 1, 8) and cols.shape == (1, 2, 1, 3, 3)


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
