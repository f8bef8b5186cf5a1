import pytest
import torch
from hypothesis import given, settings, strategies as st

from held import held_at_once, in_groups
from saved import saved_bytes
from timm_selfconv.layers import SelfAttention2d, explicit_maps, separable_attention
from timm_selfconv.layers.kernels import positions
from timm_selfconv.layers.kernels.positions import attend_to_maps, map_attention


def inputs(heads=3, queries=4, batch=3, height=2, width=3, channels=5, out_channels=2, seed=0):
    """Maps, input, weight and bias that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = (
        normal(heads, queries, height * width).softmax(-1), normal(batch, height, width, channels),
        normal(out_channels, heads * channels), normal(out_channels))
    return [t.requires_grad_() for t in tensors]


def head_by_head(maps, x, weight, bias):
    """Equation (1): each head's values, gathered by its map, summed."""
    values = weight.split(x.shape[3], dim=1)
    return sum(a @ x.flatten(1, 2) @ w.T for a, w in zip(maps, values)) + bias


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 2 ** 12), st.sets(st.integers(0, 3), max_size=3))
def test_groups_of_any_size_equal_each_head_by_itself(heads, queries, batch, height, width, nbytes, frozen):
    """Whichever gradients are wanted."""
    tensors = inputs(heads, queries, batch, height, width)
    for i in frozen:
        tensors[i].requires_grad_(False)
    wanted, grad = [t for t in tensors if t.requires_grad], torch.randn(batch, queries, 2, dtype=torch.float64)
    with held_at_once(nbytes):
        out, expected = map_attention(*tensors), head_by_head(*tensors)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o, wanted, grad) for o in (out, expected)))


def test_first_and_second_derivatives():
    assert torch.autograd.gradcheck(map_attention, inputs())
    assert torch.autograd.gradgradcheck(map_attention, inputs(2, 2, 2, 2, 2, 2))


def processor(monkeypatch, **capabilities):
    """A processor that has these, as far as we ask."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: capabilities, raising=False)


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
    processor(monkeypatch, **capabilities)
    seen = []
    monkeypatch.setattr(positions, 'map_attention', lambda *inputs: seen.append(inputs) or map_attention(*inputs))
    rows, cols = (torch.rand(2, n, n).softmax(-1) for n in grid)
    x, weight = (torch.ones(shape, dtype=dtype) for shape in ((1, *grid, channels), (1, 2 * channels)))
    separable_attention(rows, cols, x, weight, None)
    assert bool(seen) is wanted


@pytest.mark.parametrize('width', [4, 16])  # maps of 4 columns, factors of 16
def test_maps_and_factors_agree(width, monkeypatch):
    processor(monkeypatch, amx_bf16=True)
    generator = torch.Generator().manual_seed(0)
    rows, cols, x, weight, bias = (torch.randn(shape, generator=generator) for shape in (
        (3, 4, 4), (3, width, width), (2, 4, width, 16), (5, 48), (5,)))
    rows, cols = rows.softmax(-1), cols.softmax(-1)
    half = separable_attention(rows, cols, x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    wanted = separable_attention(rows, cols, x, weight, bias)
    assert (half - wanted).norm() < 0.01 * wanted.norm()


def test_no_probability_is_denormal():
    probs = torch.tensor([[[0.5, 1e-29, 1e-31, 1e-40, 0.]]])
    for dtype in (torch.float32, torch.float64):
        one_hot = torch.eye(5, dtype=dtype)
        out = attend_to_maps(one_hot.view(1, 1, 5, 5), probs, one_hot[:, None])
        assert out.tolist() == [[[0.5, probs[0, 0, 1].item(), 0., 0., 0.]]]


@pytest.mark.parametrize('hook', ['values', 'dropout', 'none'])
def test_a_general_quadratic_layer_keeps_maps_and_input_alone(hook):
    """Unless somebody waits for what comes to its value map."""
    attn = SelfAttention2d(16, 9, encoding='quadratic_gen')
    x, seen = torch.randn(16, 4, 4, 16, requires_grad=True), []
    expected = saved_bytes(attn, x)[1]
    if hook != 'none':
        module = attn.value if hook == 'values' else attn.attn_drop
        module.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    with in_groups():
        kept, out = saved_bytes(attn, x)
    assert seen == {'values': [(16, 4, 4, 144)], 'dropout': [(1, 9, 16, 16)], 'none': []}[hook]
    assert kept > 9 * x.nbytes if hook == 'values' else kept < 5 * x.nbytes
    torch.testing.assert_close(out, expected)
    with explicit_maps():
        torch.testing.assert_close(attn(x), expected)
