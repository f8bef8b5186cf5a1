import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.theory import acting_taps, center_of_mass, entropy, interior, largest_probability, mean_distance, \
    mirror_symmetry, spread, tap_offsets, translation_consistency

PER_QUERY = [spread, entropy, largest_probability, mean_distance]
PER_HEAD = [translation_consistency, mirror_symmetry]
SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2 ** 20)


def random_maps(height, width, seed=0, sharpness=2.):
    """Softmax of noise: nothing about them is constant over queries."""
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(height, width, height * width, generator=generator, dtype=torch.double)
    return scores.softmax(-1).unflatten(-1, (height, width))


def relative_maps(scores):
    """Softmax of scores that depend on the offset alone, shape (2 H - 1, 2 W - 1), zero offset in the middle."""
    height, width = (scores.shape[0] + 1) // 2, (scores.shape[1] + 1) // 2
    rows = torch.arange(height)[None, :] - torch.arange(height)[:, None] + height - 1
    cols = torch.arange(width)[None, :] - torch.arange(width)[:, None] + width - 1
    scores = scores[rows[:, None, :, None], cols[None, :, None, :]]
    return scores.flatten(2).softmax(-1).view_as(scores)


def shift_maps(a, b, height, width):
    """A one-hot head at an offset; a key outside the grid gives way to the nearest inside."""
    maps = torch.zeros(height, width, height, width, dtype=torch.double)
    for i, j in itertools.product(range(height), range(width)):
        maps[i, j, min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)] = 1.
    return maps


@pytest.mark.parametrize('a,b', [(0, 0), (2, -1), (-1, 0), (0, 2)])
def test_a_head_that_looks_at_one_offset(a, b):
    maps = shift_maps(a, b, 7, 8)
    inside = interior(center_of_mass(maps).movedim(-1, 0), 5)
    assert (inside[0] == a).all() and (inside[1] == b).all()
    assert (spread(maps) == 0).all() and (entropy(maps) == 0).all() and (largest_probability(maps) == 1).all()
    torch.testing.assert_close(interior(mean_distance(maps), 5), torch.full((3, 4), math.hypot(a, b)).double())
    assert translation_consistency(maps) == 1
    assert mirror_symmetry(maps) == (0 if b else 1)
    assert center_of_mass(maps)[0, 0].tolist() == [max(a, 0), max(b, 0)]  # the corner can't look up or left


def test_a_head_that_looks_everywhere():
    height, width = 5, 8
    maps = torch.full((height, width, height, width), 1 / 40).double()
    for i, j in itertools.product(range(height), range(width)):
        expected = [(height - 1) / 2 - i, (width - 1) / 2 - j]
        assert center_of_mass(maps)[i, j].tolist() == pytest.approx(expected)
    ones = torch.ones(height, width).double()
    torch.testing.assert_close(spread(maps), ones * math.sqrt((height ** 2 - 1) / 12 + (width ** 2 - 1) / 12))
    torch.testing.assert_close(entropy(maps), ones * math.log(40))
    torch.testing.assert_close(largest_probability(maps), ones / 40)
    corner = sum(math.hypot(i, j) for i in range(height) for j in range(width)) / 40
    assert mean_distance(maps)[0, -1] == pytest.approx(corner)
    assert translation_consistency(maps) == pytest.approx(1) and mirror_symmetry(maps) == pytest.approx(1)


def test_a_gaussian_head_of_a_layer():
    """Sums over the two axes of a discrete Gaussian cut off at the border, at every query."""
    height, width, center, sigma = 6, 7, (0.5, -1.25), 0.8
    attn = SelfAttention2d(4, num_heads=1).double()
    with torch.no_grad():
        attn.encoding.centers.copy_(torch.tensor([center]))
        attn.encoding.spreads.fill_(1 / sigma)
        maps = attn.attention_probs(torch.zeros(1, height, width, 4).double())[0, 0]
    for query in itertools.product(range(height), range(width)):
        axes = []
        for place, size, middle in zip(query, (height, width), center):
            offsets = [k - place for k in range(size)]
            weights = [math.exp(-(d - middle) ** 2 / (2 * sigma ** 2)) for d in offsets]
            axes.append([(d, w / sum(weights)) for d, w in zip(offsets, weights)])
        means = [sum(d * p for d, p in axis) for axis in axes]
        variances = [sum((d - mean) ** 2 * p for d, p in axis) for axis, mean in zip(axes, means)]
        assert center_of_mass(maps)[query].tolist() == pytest.approx(means)
        assert spread(maps)[query] == pytest.approx(math.sqrt(sum(variances)))
        assert entropy(maps)[query] == pytest.approx(-sum(p * math.log(p) for axis in axes for _, p in axis))
        assert largest_probability(maps)[query] == pytest.approx(math.prod(max(p for _, p in axis) for axis in axes))
        distance = sum(p1 * p2 * math.hypot(d1, d2) for d1, p1 in axes[0] for d2, p2 in axes[1])
        assert mean_distance(maps)[query] == pytest.approx(distance)
    assert translation_consistency(maps) == pytest.approx(1)


def loop_consistency(maps):
    """The mean over pairs of queries, as its words say it, over dictionaries of offsets."""
    height, width = maps.shape[:2]
    patterns = [
        {(k - i, m - j): float(maps[i, j, k, m]) for k in range(height) for m in range(width)}
        for i, j in itertools.product(range(height), range(width))]
    total = weight = 0.
    for p, q in itertools.combinations(patterns, 2):
        common = set(p) & set(q)
        mass_p, mass_q = sum(p[d] for d in common), sum(q[d] for d in common)
        if mass_p * mass_q > 0:
            distance = sum(abs(p[d] / mass_p - q[d] / mass_q) for d in common) / 2
            total += mass_p * mass_q * (1 - distance)
            weight += mass_p * mass_q
    return total / weight if weight else 1.


def loop_symmetry(maps):
    height, width = maps.shape[:2]
    total = weight = 0.
    for i, j in itertools.product(range(height), range(1, width - 1)):
        seen = [(k, m) for k in range(height) for m in range(width) if 0 <= 2 * j - m < width]
        mass = sum(float(maps[i, j, k, m]) for k, m in seen)
        if mass > 0:
            distance = sum(abs(float(maps[i, j, k, m] - maps[i, j, k, 2 * j - m])) for k, m in seen) / mass / 2
            total += mass * (1 - distance)
            weight += mass
    return total / weight if weight else 1.


@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, SEEDS, st.sampled_from([0.5, 3., 50.]))
def test_what_compares_maps_against_loops(height, width, seed, sharpness):
    maps = random_maps(height, width, seed, sharpness)
    assert translation_consistency(maps) == pytest.approx(loop_consistency(maps))
    assert mirror_symmetry(maps) == pytest.approx(loop_symmetry(maps))


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, SEEDS, st.floats(0., 20.))
def test_scores_of_the_offset_alone_are_consistent(height, width, seed, sharpness):
    scores = sharpness * torch.randn(
        2 * height - 1, 2 * width - 1, generator=torch.Generator().manual_seed(seed)).double()
    assert translation_consistency(relative_maps(scores)) == pytest.approx(1.)
    assert mirror_symmetry(relative_maps(scores + scores.flip(-1))) == pytest.approx(1.)


def test_a_head_that_looks_at_one_place_is_not_consistent():
    maps = torch.zeros(6, 7, 6, 7)
    maps[..., 3, 3] = 1.
    assert translation_consistency(maps) == 0
    corner = torch.zeros(6, 7, 6, 7)
    corner[..., 0, 0] = 1.  # so does a head that looks up and left as far as it can
    assert translation_consistency(corner) == 1


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, SEEDS, st.floats(0., 20.))
def test_bounds(height, width, seed, sharpness):
    maps = random_maps(height, width, seed, sharpness)
    keys, tolerance = height * width, 1e-9
    assert ((entropy(maps) >= 0) & (entropy(maps) <= math.log(keys) + tolerance)).all()
    assert ((largest_probability(maps) >= 1 / keys - tolerance) & (largest_probability(maps) <= 1 + tolerance)).all()
    assert (-largest_probability(maps).log() <= entropy(maps) + tolerance).all()
    squared = spread(maps).square() + center_of_mass(maps).square().sum(-1)  # the mean squared distance
    assert (center_of_mass(maps).norm(dim=-1) <= mean_distance(maps) + tolerance).all()
    assert (mean_distance(maps).square() <= squared + tolerance).all()
    assert -tolerance <= translation_consistency(maps) <= 1 + tolerance
    assert -tolerance <= mirror_symmetry(maps) <= 1 + tolerance


@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, SEEDS)
def test_mirrors_and_turns(height, width, seed):
    maps = random_maps(height, width, seed)
    center = center_of_mass(maps)
    left_right = maps.flip(-1, -3)
    turned = maps.rot90(dims=(-2, -1)).rot90(dims=(-4, -3))  # a quarter, against the clock
    torch.testing.assert_close(center_of_mass(left_right), center.flip(1) * torch.tensor([1., -1.]))
    torch.testing.assert_close(
        center_of_mass(turned), (center[..., [1, 0]] * torch.tensor([-1., 1.])).rot90(dims=(0, 1)))
    for statistic in PER_QUERY:
        torch.testing.assert_close(statistic(left_right), statistic(maps).flip(1))
        torch.testing.assert_close(statistic(turned), statistic(maps).rot90())
    torch.testing.assert_close(translation_consistency(left_right), translation_consistency(maps))
    torch.testing.assert_close(translation_consistency(turned), translation_consistency(maps))
    torch.testing.assert_close(mirror_symmetry(left_right), mirror_symmetry(maps))
    torch.testing.assert_close(mirror_symmetry(maps.flip(-2, -4)), mirror_symmetry(maps))


@pytest.mark.parametrize('statistic', [center_of_mass, *PER_QUERY, *PER_HEAD])
def test_axes_before_the_queries_are_kept(statistic):
    maps = [random_maps(3, 4, seed) for seed in range(6)]
    together = statistic(torch.stack(maps).unflatten(0, (2, 3)))
    torch.testing.assert_close(together, torch.stack([statistic(m) for m in maps]).unflatten(0, (2, 3)))
    with pytest.raises(ValueError, match=r'maps of shape \[3, 4, 4, 3\]'):
        statistic(torch.ones(3, 4, 4, 3))


def test_acting_taps():
    offsets = [(0, 0), (-1, 1), (1, 0), (0, 2)]
    heads = torch.stack([shift_maps(a, b, 6, 7) for a, b in offsets])
    flat = torch.full((6, 7, 6, 7), 1 / 42).double()
    expected = torch.zeros(4, 9, dtype=torch.bool)
    for head, offset in enumerate(offsets[:3]):  # the last is no tap of a 3 x 3 kernel
        expected[head, tap_offsets(3).tolist().index(list(offset))] = True

    for share, acts in ((1., True), (0.51, True), (0.5 - 1 / 42, False)):
        assert torch.equal(acting_taps(share * heads + (1 - share) * flat, 3), expected & acts)
    even = (heads[:1] + heads[2:3]) / 2  # half on either of two
    assert not acting_taps(even, 3).any()

    once = heads.clone()
    once[0, 0, 0], once[1, 5, 3] = flat[0, 0], flat[5, 3]  # the border is not asked
    assert torch.equal(acting_taps(once, 3), expected)
    once[2, 4, 5] = flat[4, 5]  # but every query within
    expected[2] = False
    assert torch.equal(acting_taps(once, 3), expected)
    assert torch.equal(acting_taps(torch.stack([heads, once]), 3), expected)  # in every image


def test_acting_taps_of_a_5x5_kernel():
    acting = acting_taps(torch.stack([shift_maps(0, 2, 6, 7), shift_maps(-2, -2, 6, 7)]), 5)
    assert acting.nonzero().tolist() == [[0, 14], [1, 0]]
    with pytest.raises(ValueError, match='kernel_size=7: needs a kernel that fits'):
        acting_taps(torch.ones(2, 6, 7, 6, 7), 7)
