"""Windows of Gaussian heads against whole maps in float64."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from held import held_at_once
from timm_selfconv.layers import QuadraticEncoding, SelfAttention2d, attention
from timm_selfconv.layers.encodings.windows import gaussian_windows


def whole_map(center, spread, height, width):
    """Softmax of equation (9) with a full precision, query before key, shape (H W, H W)."""
    grid = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double()
    distance = grid[None] - grid[:, None] - center
    return (-0.5 * (distance @ spread).square().sum(-1)).softmax(-1)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 10 ** 6), st.floats(-3, 3), st.floats(0, 20))
def test_windows_hold_heads_to_rounding(height, width, seed, log_scale, reach):
    generator = torch.Generator().manual_seed(seed)
    centers = reach * torch.randn(2, 2, generator=generator, dtype=torch.float64)
    spreads = 10 ** log_scale * torch.randn(2, 2, 2, generator=generator, dtype=torch.float64)
    first = seed % height
    queries = torch.arange(height)[first:first + 2]
    windows = gaussian_windows(centers, spreads @ spreads.mT, height, width, queries)
    for h, (probs, i, j) in enumerate(windows):
        expected = whole_map(centers[h], spreads[h], height, width)[first * width:(first + 2) * width]
        found = torch.zeros_like(expected)
        found[:, i * width:j * width] = probs
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_local_heads_have_small_windows_and_flat_ones_all():
    spreads = torch.stack([torch.eye(2), torch.tensor([[2., 0.], [1., 2.]]), torch.zeros(2, 2)])
    windows = gaussian_windows(torch.zeros(3, 2), spreads @ spreads.mT, 50, 50, torch.tensor([20]))
    windows = [(i, j) for _, i, j in windows]
    assert 0 < 20 - windows[0][0] == windows[0][1] - 21 < 10
    assert 0 < 20 - windows[1][0] == windows[1][1] - 21 < 20 and windows[2] == (0, 50)


@pytest.mark.parametrize('degenerate', [0., 1e-20, 1e20])
def test_degenerate_heads_are_numbers(degenerate):
    encoding = QuadraticEncoding(2, 4, full=True)
    with torch.no_grad():
        encoding.spreads.copy_(torch.tensor([[[degenerate, 0.], [0., 1.]], [[1., 1.], [degenerate, degenerate]]]))
    for probs, _, _ in gaussian_windows(torch.full((2, 2), 30.), encoding.precisions(), 6, 5, torch.arange(6)):
        torch.testing.assert_close(probs.sum(-1), torch.ones(30))


def test_large_grids_take_windows_forward_and_backward(monkeypatch):
    torch.manual_seed(0)
    attn = SelfAttention2d(4, 3, encoding='quadratic_gen').double()
    with torch.no_grad():
        attn.encoding.spreads.mul_(9)
    x = torch.randn(1, 12, 11, 4, dtype=torch.float64, requires_grad=True)
    sizes, steps = [], []

    def watched(*args):
        for window in gaussian_windows(*args):
            sizes.append(window[0].numel())
            yield window

    monkeypatch.setattr(attention, 'gaussian_windows', watched)
    for nbytes in (2 ** 27, 3 * 2 * 11 * 132 * 8):  # all at once, and two rows of queries at a time
        with held_at_once(nbytes):
            out = attn(x)
            steps.append((out, torch.autograd.grad(out.square().sum(), [x, *attn.parameters()])))
    torch.testing.assert_close(*steps)
    assert len(sizes) == 6 * 3 and max(sizes) < 2 * 11 * 132  # two rows' queries to less than all keys
