import pytest
import torch
from hypothesis import given, settings, strategies as st

from held import held_at_once, in_groups
from saved import saved_bytes
from timm_selfconv.layers import SelfAttention2d, separable_attention
from timm_selfconv.layers.kernels.positions import map_attention, maps_of_factors


def inputs(heads=3, batch=3, height=3, width=4, channels=5, out_channels=2, dtype=torch.float64, seed=0, queries=None):
    """Probabilities, input, weight and bias that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows, cols = queries or (height, width)
    tensors = (
        normal(heads, rows, height).softmax(-1), normal(heads, cols, width).softmax(-1),
        normal(batch, height, width, channels), normal(out_channels, heads * channels), normal(out_channels))
    return [t.to(dtype).requires_grad_() for t in tensors]


def by_the_map(rows, cols, x, weight, bias):
    """Equation (1) with the whole map, a Kronecker product a head."""
    maps = torch.stack([torch.kron(r, c) for r, c in zip(rows, cols)])
    gathered = torch.einsum('hqk,bkc->bqhc', maps, x.flatten(1, 2)).flatten(2)
    return torch.nn.functional.linear(gathered, weight, bias).view(len(x), rows.shape[1], cols.shape[1], len(weight))


def through_maps(rows, cols, x, weight, bias):
    out = map_attention(maps_of_factors(rows, cols), x, weight, bias)
    return out.unflatten(1, (rows.shape[1], cols.shape[1]))


@pytest.fixture(params=[3500, 1500, 1], ids=['many images', 'one image', 'one head'])
def budget(request):
    """Groups of every kind: an image takes 3 x 4 pixels x 2 to 5 channels x 8 bytes a head."""
    with held_at_once(request.param):
        yield


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4), st.integers(0, 4), st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 2 ** 12), st.booleans(),
    st.sets(st.integers(0, 3), max_size=3))
def test_groups_of_any_size_equal_the_map(heads, batch, keys, queries, nbytes, biased, frozen):
    """Whichever gradients are wanted."""
    tensors = inputs(heads, batch, *keys, queries=queries)
    tensors = tensors if biased else [*tensors[:-1], None]
    grad = torch.randn(batch, *queries, 2, dtype=torch.float64)
    for i in frozen:
        tensors[i].requires_grad_(False)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    with held_at_once(nbytes):
        out, expected = separable_attention(*tensors), by_the_map(*tensors)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o, wanted, grad) for o in (out, expected)))


def test_first_and_second_derivatives(budget):
    assert torch.autograd.gradcheck(separable_attention, inputs())
    assert torch.autograd.gradgradcheck(separable_attention, inputs(2, 2, 2, 2, 2))


@pytest.mark.parametrize('dtype,tolerance', [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 2e-3)])
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('by_maps', [False, True])
def test_every_dtype_to_its_rounding(dtype, tolerance, autocast, by_maps):
    """Against float64 on the same numbers: the error relative to the largest is a few roundings."""
    attend = through_maps if by_maps else separable_attention
    exact = inputs(9, 8, 6, 6, 40, 40)
    tensors = [t.detach().to(torch.float32 if autocast or i < 2 else dtype).requires_grad_()
               for i, t in enumerate(exact)]
    grad = torch.randn(8, 6, 6, 40, dtype=torch.float64)
    with held_at_once(2 ** 14):
        with torch.autocast('cpu', dtype, enabled=autocast and dtype != torch.float32):
            out = attend(*tensors)
        gradients = torch.autograd.grad(out, tensors, grad.to(dtype))
    assert out.dtype == dtype
    expected = by_the_map(*exact)
    for a, b, of in zip((out, *gradients), (expected, *torch.autograd.grad(expected, exact, grad)), (out, *tensors)):
        assert a.dtype == of.dtype
        assert (a - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_inputs_of_any_layout(layout, budget):
    tensors = inputs()
    tensors[2] = tensors[2].permute(0, 3, 1, 2).contiguous(memory_format=layout).permute(0, 2, 3, 1)
    with torch.no_grad():
        torch.testing.assert_close(separable_attention(*tensors), by_the_map(*tensors))


def test_a_training_step_keeps_no_more_than_the_input():
    attn = SelfAttention2d(16, 9)
    x = torch.randn(16, 8, 8, 16, requires_grad=True)
    with in_groups():
        kept, out = saved_bytes(attn, x)
    assert kept < 2.5 * x.nbytes  # the input, the input of the projection, and the factors
    attn.value.register_forward_hook(lambda module, args, out: None)  # who hooks the values sees them called
    plain, expected = saved_bytes(attn, x)
    assert plain > 18 * x.nbytes
    torch.testing.assert_close(out, expected)
