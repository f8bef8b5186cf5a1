"""Each formula against explicit maps in float64, and the choice of the formula."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import functional
from timm_selfconv.layers.functional import dense_scores, gather_by_factors, gather_by_maps, gather_fused, \
    maps_of_factors, prefers_maps, prefers_scores
from tiny_nets import noise

sides = st.tuples(st.integers(1, 6), st.integers(1, 6))


def inputs(heads, batch, keys, queries, channels=5):
    """Make row and column probabilities and pixels."""
    rows, cols = (noise(heads, q, k, seed=q).softmax(-1) for q, k in zip(queries, keys))
    return rows, cols, noise(batch, *keys, channels)


def by_the_map(rows, cols, x):
    """Compute equation (1) with an explicit map, the Kronecker product of the factors of a head."""
    maps = torch.stack([torch.kron(r, c) for r, c in zip(rows, cols)])
    return torch.einsum('hqk,bkc->bqhc', maps, x.flatten(1, 2)).flatten(2).unflatten(1, (rows.shape[1], -1))


def through_maps(rows, cols, x):
    return gather_by_maps(maps_of_factors(rows, cols), x, cols.shape[1])


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(0, 4), sides, sides)
def test_factors_and_maps_are_the_product_with_the_map(heads, batch, keys, queries):
    tensors = inputs(heads, batch, keys, queries)
    for gather in (gather_by_factors, through_maps):
        torch.testing.assert_close(gather(*tensors), by_the_map(*tensors))


@pytest.mark.parametrize('gather', [gather_by_factors, through_maps])
@pytest.mark.parametrize('dtype,tolerance', [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_every_dtype_and_layout_to_its_rounding(gather, dtype, tolerance):
    exact = inputs(9, 8, (6, 6), (6, 6), 40)
    rows, cols, x = (t.float() for t in exact)
    with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
        cast = gather(rows, cols, x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1))
    expected = by_the_map(*exact)
    for out in (cast, gather(rows, cols, x.to(dtype))):
        assert out.dtype == dtype
        assert (out - expected).norm() < tolerance * expected.norm()


def test_no_probability_is_denormal():
    probs = torch.tensor([0.5, 1e-29, 1e-31, 1e-40, 0.]).view(1, 1, 1, 5)
    for dtype in (torch.float32, torch.float64):
        gathered = gather_by_maps(probs, torch.eye(5, dtype=dtype).view(1, 1, 5, 5), 1)
        assert gathered.flatten().tolist() == [0.5, probs.flatten()[1].item(), 0., 0., 0.]


def test_scores_far_from_zero_keep_their_precision():
    rows, cols = (noise(1, 2, *shape) for shape in ((3, 1, 3), (1, 4, 4)))
    rows = (4 * rows).round() / 4  # exact in float32, also with a constant
    exact = dense_scores(None, None, rows, cols, None).softmax(-1)
    shifted = dense_scores(None, None, rows.float() + 2 ** 20, cols.float() - 3, None)
    torch.testing.assert_close(shifted.softmax(-1), exact.float(), rtol=1e-6, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 3), sides, st.integers(1, 5), st.booleans())
def test_fused_attention_is_the_softmax_of_all_scores(batch, heads, grid, channels, positions):
    height, width = grid
    query, key = noise(batch, heads, height, width, channels), noise(batch, heads, height * width, channels, seed=2)
    scores = [noise(1, heads, height, 1, height), noise(1, heads, 1, width, width)] if positions else [None, None]
    x = noise(batch, height, width, 7)
    expected = gather_by_maps(dense_scores(query, key, *scores, None).softmax(-1), x, width)
    torch.testing.assert_close(gather_fused(query, key, x, *scores), expected)


@pytest.mark.parametrize('side,channels,dtype,amx,wanted', [
    (8, 48, torch.float32, False, True), (9, 400, torch.float32, True, False),
    (16, 400, torch.bfloat16, True, True), (16, 400, torch.bfloat16, False, False),
    (24, 400, torch.bfloat16, True, False)])
def test_maps_are_for_small_grids_and_matrix_units(side, channels, dtype, amx, wanted, monkeypatch):
    monkeypatch.setattr(functional, 'has_matrix_units', lambda: amx)
    x = torch.zeros(1, side, side, channels, dtype=dtype)
    assert prefers_maps(x) is wanted
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert prefers_maps(x.float()) is wanted
    assert not prefers_maps(x.to('meta'))  # where operations are counted


def test_scores_are_for_grids_that_fit(monkeypatch):
    query, key = torch.zeros(2, 3, 4, 5, 1), torch.zeros(2, 3, 20, 1)
    assert prefers_scores(query, key)
    for limit, value in (('LARGE_GRID', 20), ('SCORE_BYTES', 4 * 2 * 3 * 20 * 20 - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(functional, limit, value)
            assert not prefers_scores(query, key) and prefers_scores(query.to('meta'), key)
            patch.setattr(functional, limit, value + 1)
            assert prefers_scores(query, key)
