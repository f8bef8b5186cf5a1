"""Position-only attention by factors and by maps, against the whole map."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from held import held_at_once, in_groups
from saved import saved_bytes
from timm_selfconv.layers import SelfAttention2d, explicit_maps, separable_attention
from timm_selfconv.layers.kernels import kernel, positions
from timm_selfconv.layers.kernels.positions import attend_to_maps, map_attention, maps_of_factors


def inputs(heads=3, batch=3, height=3, width=4, channels=5, out_channels=2, queries=None):
    """Probabilities, input, weight and bias that ask for gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows, cols = queries or (height, width)
    tensors = (
        normal(heads, rows, height).softmax(-1), normal(heads, cols, width).softmax(-1),
        normal(batch, height, width, channels), normal(out_channels, heads * channels), normal(out_channels))
    return [t.requires_grad_() for t in tensors]


def by_the_map(rows, cols, x, weight, bias):
    """Equation (1) with the whole map, a Kronecker product a head."""
    maps = torch.stack([torch.kron(r, c) for r, c in zip(rows, cols)])
    gathered = torch.einsum('hqk,bkc->bqhc', maps, x.flatten(1, 2)).flatten(2)
    return torch.nn.functional.linear(gathered, weight, bias).view(len(x), rows.shape[1], cols.shape[1], len(weight))


def through_maps(rows, cols, x, weight, bias):
    out = map_attention(maps_of_factors(rows, cols), x, weight, bias)
    return out.unflatten(1, (rows.shape[1], cols.shape[1]))


each_path = pytest.mark.parametrize('attend', [separable_attention, through_maps])


@pytest.fixture(params=[3500, 1500, 1], ids=['many images', 'one image', 'one head'])
def budget(request):
    """Groups of every kind: an image takes 3 x 4 pixels x 2 to 5 channels x 8 bytes a head."""
    with held_at_once(request.param):
        yield


@each_path
@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4), st.integers(0, 4), st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 2 ** 12), st.booleans(),
    st.sets(st.integers(0, 3), max_size=3))
def test_groups_of_any_size_equal_the_map(attend, heads, batch, keys, queries, nbytes, biased, frozen):
    """Whichever gradients are wanted."""
    tensors = inputs(heads, batch, *keys, queries=queries)
    tensors = tensors if biased else [*tensors[:-1], None]
    grad = torch.randn(batch, *queries, 2, dtype=torch.float64)
    for i in frozen:
        tensors[i].requires_grad_(False)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    with held_at_once(nbytes):
        out, expected = attend(*tensors), by_the_map(*tensors)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o, wanted, grad) for o in (out, expected)))


@each_path
def test_first_and_second_derivatives(attend, budget):
    assert torch.autograd.gradcheck(attend, inputs())
    assert torch.autograd.gradgradcheck(attend, inputs(2, 2, 2, 2, 2))


@each_path
@pytest.mark.parametrize('dtype,tolerance', [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 2e-3)])
@pytest.mark.parametrize('autocast', [False, True])
def test_every_dtype_to_its_rounding(attend, dtype, tolerance, autocast):
    """Against float64 on the same numbers: the error relative to the largest is a few roundings."""
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


@each_path
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_inputs_of_any_layout(attend, layout, budget):
    tensors = inputs()
    tensors[2] = tensors[2].permute(0, 3, 1, 2).contiguous(memory_format=layout).permute(0, 2, 3, 1)
    with torch.no_grad():
        torch.testing.assert_close(attend(*tensors), by_the_map(*tensors))


@pytest.mark.parametrize('grid,channels,dtype,capabilities,wanted', [
    ((4, 4), 16, torch.bfloat16, dict(amx_bf16=True), True),
    ((2, 2), 96, torch.bfloat16, dict(amx_bf16=True, avx512_bf16=True), True),
    ((4, 4), 16, torch.float32, dict(amx_bf16=True), False),
    ((6, 6), 16, torch.bfloat16, dict(amx_bf16=True), False),
    ((4, 4), 15, torch.bfloat16, dict(amx_bf16=True), False),
    ((8, 9), 96, torch.bfloat16, dict(amx_bf16=True), True),
    ((8, 9), 96, torch.bfloat16, dict(avx512_bf16=True), False),
    ((8, 8), 96, torch.bfloat16, dict(avx512_bf16=True), True),
    ((8, 8), 63, torch.bfloat16, dict(avx512_bf16=True), False),
    ((2, 2), 96, torch.bfloat16, dict(avx2=True), False),
])
def test_processors_for_bfloat16_take_maps_of_small_grids(grid, channels, dtype, capabilities, wanted, monkeypatch):
    """And give the same numbers."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: capabilities, raising=False)
    seen = []
    monkeypatch.setattr(positions, 'map_attention', lambda *inputs: seen.append(inputs) or map_attention(*inputs))
    tensors = [t.detach() for t in inputs(2, 3, *grid, channels)]
    out = separable_attention(*(t.to(dtype if i > 1 else torch.float32) for i, t in enumerate(tensors)))
    assert bool(seen) is wanted
    expected = by_the_map(*tensors)
    assert (out - expected).norm() < 0.01 * expected.norm()


def test_no_probability_is_denormal():
    probs = torch.tensor([[[0.5, 1e-29, 1e-31, 1e-40, 0.]]])
    for dtype in (torch.float32, torch.float64):
        one_hot = torch.eye(5, dtype=dtype)
        out = attend_to_maps(one_hot.view(1, 1, 5, 5), probs, one_hot[:, None])
        assert out.tolist() == [[[0.5, probs[0, 0, 1].item(), 0., 0., 0.]]]


@pytest.mark.parametrize('encoding,hook,shapes', [
    ('quadratic', None, []), ('quadratic', 'value', [(16, 4, 4, 144)]),
    ('quadratic_gen', None, []), ('quadratic_gen', 'value', [(16, 4, 4, 144)]),
    ('quadratic_gen', 'attn_drop', [(1, 9, 16, 16)])])
def test_a_training_step_keeps_the_input_and_probabilities_only(encoding, hook, shapes):
    """Unless its value map has a hook."""
    attn = SelfAttention2d(16, 9, encoding=encoding)
    x, seen = torch.randn(16, 4, 4, 16, requires_grad=True), []
    expected = saved_bytes(attn, x)[1]
    if hook:
        getattr(attn, hook).register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    with in_groups():
        kept, out = saved_bytes(attn, x)
    assert seen == shapes
    # the input, the input of the projection, and the factors or maps
    assert kept > 9 * x.nbytes if hook == 'value' else kept < (2.5 if encoding == 'quadratic' else 5) * x.nbytes
    torch.testing.assert_close(out, expected)
    with explicit_maps():
        torch.testing.assert_close(attn(x), expected)


def test_sums_over_images_are_kept_in_more_bits_than_half_precision_has():
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)  # its sums stop at 256
    with in_groups():
        total, = kernel.in_groups(
            lambda x: x.sum(0), 1, [ones], [(0, None)], [((1,), ones.dtype)], [(None, None)], sums=torch.float32)
    assert total.tolist() == [1000.] and total.dtype == ones.dtype
