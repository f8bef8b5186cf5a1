import pytest
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import separable_attention, whole_maps


@pytest.fixture
def matrix_units(monkeypatch):
    """A processor with AMX, as far as we ask."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'amx_bf16': True}, raising=False)


@pytest.mark.parametrize('grid,channels,dtype,wanted', [
    ((16, 16), 400, torch.bfloat16, True),
    ((8, 8), 96, torch.bfloat16, True),
    ((16, 16), 400, torch.float32, False),
    ((24, 24), 400, torch.bfloat16, False),
    ((16, 16), 96, torch.bfloat16, False),
])
def test_matrix_units_take_whole_maps_of_small_grids(grid, channels, dtype, wanted, matrix_units):
    assert whole_maps.maps_are_faster(torch.empty(1, *grid, channels, dtype=dtype)) is wanted


@pytest.mark.parametrize('capabilities', [{}, {'amx_bf16': False}, {'avx512_bf16': True}])
def test_no_other_processor_does(capabilities, monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: capabilities, raising=False)
    assert whole_maps.maps_are_faster(torch.empty(1, 2, 2, 8, dtype=torch.bfloat16)) is False


def test_nor_a_torch_that_cannot_say(monkeypatch):
    monkeypatch.delattr(torch.cpu, 'get_capabilities', raising=False)
    assert whole_maps.maps_are_faster(torch.empty(1, 2, 2, 8, dtype=torch.bfloat16)) is False


@pytest.mark.parametrize('width', [4, 16])  # whole maps of 4 columns, factors of 16
def test_both_ways_agree(width, matrix_units):
    generator = torch.Generator().manual_seed(0)
    rows, cols, x, weight, bias = (torch.randn(shape, generator=generator) for shape in (
        (3, 4, 4), (3, width, width), (2, 4, width, 16), (5, 48), (5,)))
    rows, cols = rows.softmax(-1), cols.softmax(-1)
    half = separable_attention(rows, cols, x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    wanted = separable_attention(rows, cols, x, weight, bias)
    assert (half - wanted).norm() < 0.01 * wanted.norm()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_map_is_a_kronecker_product_of_each_head(heads, height, width):
    rows, cols = torch.rand(heads, height, height).double(), torch.rand(heads, width, width).double()
    maps = whole_maps.whole_maps(rows, cols).view(height * width, heads, height * width)
    for head in range(heads):
        torch.testing.assert_close(maps[:, head], torch.kron(rows[head], cols[head]))


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_gradients_of_factors_are_autograds(heads, height, width):
    rows, cols = (torch.rand(heads, n, n).double().requires_grad_() for n in (height, width))
    grad = torch.rand(height * width * heads, height * width).double()
    wanted = torch.autograd.grad(whole_maps.whole_maps(rows, cols), (rows, cols), grad)
    torch.testing.assert_close(whole_maps.factors_gradient(grad, rows.detach(), cols.detach()), wanted)
