import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from head_maps import random_maps, shift_maps
from timm_selfconv.theory import at_taps, conv_residual, conv_to_attention, interior, tap_offsets


def squared_distance(target, columns):
    """Return the squared distance from the span of the columns, by least squares."""
    return float((columns @ torch.linalg.lstsq(columns, target[:, None]).solution - target[:, None]).square().sum())


def loop_residuals(maps, offsets, interior_only):
    """Return per-query, layer and shared residuals of maps (heads, H, W, H, W), with loops over queries and taps."""
    (height, width), offsets = maps.shape[1:3], list(map(tuple, offsets))
    columns = {(i, j): maps[:, i, j].flatten(1).T for i in range(height) for j in range(width)}
    units = torch.eye(height * width).double().unflatten(0, (height, width))
    targets = {
        ((i, j), (a, b)): units[i + a, j + b] for i, j in columns for a, b in offsets
        if 0 <= i + a < height and 0 <= j + b < width}
    distances = {(query, tap): squared_distance(target, columns[query]) for (query, tap), target in targets.items()}
    per_query = [np.mean([distances[query, tap] for tap in offsets if (query, tap) in targets]) for query in columns]
    layer, shared = [], []
    for tap in offsets:
        inside = [q for q in columns if all((q, other) in targets for other in (offsets if interior_only else [tap]))]
        layer += [distances[query, tap] for query in inside]
        together = torch.cat([targets[query, tap] for query in inside]), torch.cat([columns[query] for query in inside])
        shared.append(squared_distance(*together) / len(inside))
    return np.reshape(per_query, (height, width)), np.mean(layer), np.mean(shared)


@pytest.mark.parametrize('kernel_size', [2, 3, (3, 2)])
def test_taps_lie_where_torch_s_same_padding_puts_them(kernel_size):
    x = torch.randn(7, 8, dtype=torch.double)
    size = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    weight = torch.randn(size, dtype=torch.double)
    under_taps = at_taps(x.expand(7, 8, 7, 8), kernel_size)
    convolved = torch.einsum('t,tij->ij', weight.flatten(), under_taps)
    torch.testing.assert_close(convolved, F.conv2d(x[None, None], weight[None, None], padding='same')[0, 0])
    valid = interior(convolved, kernel_size)
    torch.testing.assert_close(valid, F.conv2d(x[None, None], weight[None, None])[0, 0])
    with pytest.raises(ValueError, match=r'maps of shape \[8, 7, 7, 8\]'):
        at_taps(x.T[..., None, None].expand(8, 7, 7, 8), kernel_size)


@pytest.mark.parametrize('kernel,heads', [(2, 4), (3, 9), ((3, 2), 3), ([(0, 0), (3, -2), (-1, 4)], 3)])
def test_residuals_equal_least_squares(kernel, heads):
    """By size at the interior queries, by offsets at the queries from which each tap is on the grid."""
    maps, by_size = random_maps(heads, 5, 6), not isinstance(kernel, list)
    result = conv_residual(maps, kernel if by_size else torch.tensor(kernel))
    per_query, layer, shared = loop_residuals(maps, tap_offsets(kernel).tolist() if by_size else kernel, by_size)
    np.testing.assert_allclose(result.per_query.numpy(), per_query, rtol=0, atol=1e-12)
    assert result.layer == pytest.approx(layer, abs=1e-12)
    assert result.shared == pytest.approx(shared, abs=1e-12)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 11), st.integers(0, 2 ** 20))
def test_lemma_3_mixtures_suffice_if_there_are_as_many_as_taps(heads, seed):
    """No head needs to be a tap, and further heads do no harm. Random mixtures are independent."""
    mixture = torch.rand(heads, 9, generator=torch.Generator().manual_seed(seed)).double()
    mixture /= mixture.sum(1, keepdim=True)
    result = conv_residual(torch.einsum('ht,tijkl->hijkl', mixture, shift_maps(tap_offsets(3).tolist())), 3)
    expected = pytest.approx(max(0, 1 - heads / 9), abs=1e-9)
    assert result.layer == expected and result.shared == expected


def test_lemma_3_alone_makes_no_convolution():
    """Two heads that swap taps on a chessboard span both taps at every query, but need two sets of value matrices."""
    here, right = shift_maps([(0, 0), (0, 1)], height=4, width=7)
    black = ((torch.arange(4)[:, None] + torch.arange(7) + 1) % 2)[:, :, None, None]
    maps = torch.stack([black * here + (1 - black) * right, black * right + (1 - black) * here])
    shifts = torch.stack([here, right])
    for swapped in (maps, torch.stack([shifts, shifts.flip(0)])):  # by place, by image
        result = conv_residual(swapped, (1, 2))
        assert result.layer < 1e-14 and result.shared == pytest.approx(0.5)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_heads_that_differ_by_rounding_are_one_head(dtype):
    """Flat heads have a residual of 1 - 1 / keys, even if they differ by rounding."""
    noise = 1 + 2 * torch.finfo(dtype).eps * torch.randn(9, 6, 7, 6, 7, generator=torch.Generator().manual_seed(0))
    result = conv_residual(noise.to(dtype) / 42, 3)
    assert result.layer == pytest.approx(1 - 1 / 42, abs=1e-5)
    assert result.shared == pytest.approx(1 - 1 / 42, abs=1e-5)


@pytest.mark.parametrize('kernel_size', [2, 3, (3, 2)])
def test_theorem_1_a_converted_convolution_expresses_every_other(kernel_size):
    """Keys include the padded pixels, which are removed here, so it is a convolution also at the border."""
    conv = conv_to_attention(torch.nn.Conv2d(2, 2, kernel_size, padding='same').double())
    rows, cols = tap_offsets(kernel_size).amin(0).neg().tolist()
    maps = conv.attention_probs((6, 7))[..., rows:rows + 6, cols:cols + 7].detach()
    result = conv_residual(maps, kernel_size)
    assert result.per_query.max() < 1e-14 and result.shared < 1e-14
    assert conv_residual(maps, 5).layer == pytest.approx(1 - len(tap_offsets(kernel_size)) / 25, abs=1e-14)


@pytest.mark.parametrize('shape,kernel_size,match', [
    ((4, 5, 5, 6), 3, r'maps of shape \[4, 5, 5, 6\]: needs \(..., height, width, height, width\)'),
    ((4, 5, 4, 5), 3, 'needs an axis of heads'),
    ((9, 4, 5, 4, 5), 5, 'kernel_size=5: needs a kernel that fits in a grid of 4 x 5'),
    ((9, 4, 5, 4, 5), 0, 'kernel_size=0: needs a positive integer'),
    ((9, 4, 5, 4, 5), torch.tensor([(0, 0), (4, 0)]), 'needs offsets that fall on a grid of 4 x 5'),
    ((9, 4, 5, 4, 5), torch.tensor([1, 2, 3]), r'kernel of shape \[3\]: needs whole offsets'),
])
def test_bad_input_is_named(shape, kernel_size, match):
    with pytest.raises(ValueError, match=match):
        conv_residual(torch.ones(shape), kernel_size)
