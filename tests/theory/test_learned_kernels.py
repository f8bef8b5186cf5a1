"""Kernels that layers learned, against maps with known offsets, and loops over queries."""
import itertools

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st

from drawn import set_heads
from head_maps import random_maps, shift_maps
from timm_selfconv.theory import learned_kernel, learned_kernels, untrained_copy
from tiny_nets import NARROW


def most_attended(maps):
    """Offset, mean and least attention of one head's maps, shape (H, W, H, W), in the words of their definition."""
    height, width = maps.shape[:2]
    offsets = itertools.product(range(1 - height, height), range(1 - width, width))
    near = {offset: (maps * shift_maps([offset], height, width)[0]).sum((2, 3)) for offset in offsets}
    a, b = max(near, key=lambda offset: near[offset].sum())
    there = near[a, b][max(0, -a):height - max(0, a), max(0, -b):width - max(0, b)]
    return (a, b), float(near[a, b].mean()), float(there.min())


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2 ** 20), st.sampled_from([1., 8.]))
def test_most_attended_offsets(height, width, seed, sharpness):
    maps = random_maps(2, height, width, seed=seed, sharpness=sharpness)
    for head, own in zip(learned_kernel(maps).heads, maps, strict=True):
        offset, mean, least = most_attended(own)
        assert head.offset == offset and head.in_every_image
        assert (head.mean, head.least) == pytest.approx((mean, least))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=4), st.integers(0, 2 ** 20))
def test_a_sparse_convolution_is_its_own_kernel(offsets, seed):
    """Shifts, and a head that looks everywhere: whichever the offsets, the residual to them is 0."""
    flat = torch.full((1, 6, 7, 6, 7), 1 / 42).double()
    maps = torch.cat([0.9 * shift_maps(offsets) + 0.1 * flat, flat])
    kernel = learned_kernel(maps)
    assert [head.offset for head in kernel.heads[:-1]] == offsets and kernel.fixed == list(range(len(offsets)))
    assert kernel.taps == sorted(set(offsets))
    assert kernel.reach == max((a * a + b * b) ** 0.5 for a, b in offsets)
    assert kernel.residual < 1e-12
    near = {tap for tap in kernel.taps if max(map(abs, tap)) <= 1}
    # between two shifts, the flat head explains a little of the taps that no head has
    assert 1 - len(near) / 9 - 0.2 < kernel.residual_3x3 <= 1 - len(near) / 9 + 1e-12
    assert learned_kernel(random_maps(len(maps), 6, 7, seed=seed), taps=kernel.taps).residual > 0.5
    assert all(head.least == pytest.approx(0.9 + 0.1 / 42) for head in kernel.heads[:-1])
    assert learned_kernel(maps, threshold=0.95).taps == [] and learned_kernel(maps, 0.95).residual is None


def test_content_has_an_offset_if_every_image_has_it():
    here, right = shift_maps([(0, 0), (0, 1)])
    flat = torch.full_like(here, 1 / 42)
    maps = torch.stack([torch.stack([here, right]), torch.stack([here, 0.4 * here + 0.6 * flat])])
    one, other = learned_kernel(maps).heads
    assert one.in_every_image and one.least == 1.
    assert not other.in_every_image and other.least == pytest.approx(0.6 / 42)
    assert learned_kernel(maps).fixed == [0] and learned_kernel(maps[:1]).fixed == [0, 1]


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_learned_content_cifar'])
def test_kernels_of_nets_before_and_after(name, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(torch.cuda, 'manual_seed_all', lambda seed: pytest.fail('changes the seed of other devices'))
    net = timm.create_model(name, num_heads=2, img_size=16, **NARROW)
    images = torch.randn(2, 3, 16, 16)
    if name == 'sa_quadratic_cifar':
        set_heads(net.blocks[0], [[0., 2.], [-1., 0.]], 20.)
        first = learned_kernels(net)[0]
        assert first.taps == [(-1, 0), (0, 2)] and first.residual < 1e-9
        assert first.untrained.taps == [] and first.untrained.residual > 0.5
    else:
        with pytest.raises(ValueError, match='images: this net looks at content'):
            learned_kernels(net)
    kernels = learned_kernels(net, images)
    assert len(kernels) == 2 and all(len(kernel.heads) == 2 for kernel in kernels)
    assert all(kernel.untrained.heads != kernel.heads for kernel in kernels)
    assert learned_kernels(untrained_copy(net), images)[0].heads == kernels[0].untrained.heads


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r'threshold=1\.5: needs a number from 0 to 1'):
        learned_kernel(random_maps(1, 3, 3), 1.5)
    with pytest.raises(ValueError, match='needs an axis of heads'):
        learned_kernel(random_maps(3, 3))
    with pytest.raises(ValueError, match='model=Linear: needs a net with SelfAttention2d layers'):
        learned_kernels(torch.nn.Linear(1, 1))
