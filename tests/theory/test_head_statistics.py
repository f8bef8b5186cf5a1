import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from head_maps import random_maps
from timm_selfconv.theory import center_of_mass, entropy, mean_distance, mirror_symmetry, overlap, spread, \
    translation_consistency

SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2 ** 20)


def dense_statistics(maps):
    """Compute the definitions from the offsets of all pairs of pixels, shape (H W, H W, 2)."""
    height, width = maps.shape[:2]
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double()
    offsets, probs = pixels - pixels[:, None], maps.flatten(2).flatten(0, 1)
    mean = (probs[..., None] * offsets).sum(1)
    return {statistic: values.unflatten(0, (height, width)) for statistic, values in {
        center_of_mass: mean,
        spread: (probs * (offsets - mean[:, None]).square().sum(-1)).sum(1).sqrt(),
        entropy: -(probs * probs.log()).sum(1),
        mean_distance: (probs * offsets.norm(dim=-1)).sum(1)}.items()}


@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, SEEDS, st.sampled_from([0., 3., 30.]))
def test_statistics_of_each_query(height, width, seed, sharpness):
    maps = random_maps(height, width, seed=seed, sharpness=sharpness)
    for statistic, expected in dense_statistics(maps).items():
        torch.testing.assert_close(statistic(maps), expected, rtol=1e-7, atol=1e-7)


def loop_consistency(maps):
    """Compute the mean over pairs of queries, with loops over offsets."""
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
    distance = weight = 0.
    for i, j, k, m in itertools.product(range(height), range(1, width - 1), range(height), range(width)):
        if 0 <= 2 * j - m < width:
            distance += abs(float(maps[i, j, k, m] - maps[i, j, k, 2 * j - m])) / 2
            weight += float(maps[i, j, k, m])
    return 1 - distance / weight if weight else 1.


@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, SEEDS, st.sampled_from([0.5, 3., 50.]))
def test_statistics_of_heads_against_loops(height, width, seed, sharpness):
    maps = random_maps(height, width, seed=seed, sharpness=sharpness)
    assert translation_consistency(maps) == pytest.approx(loop_consistency(maps))
    assert mirror_symmetry(maps) == pytest.approx(loop_symmetry(maps))
    assert mirror_symmetry(maps.transpose(0, 1).transpose(2, 3), -2) == pytest.approx(loop_symmetry(maps))
    with pytest.raises(ValueError, match='dim=2: needs -1 for left and right, or -2'):
        mirror_symmetry(maps, 2)


def test_axes_before_the_queries_are_kept():
    maps = torch.stack([random_maps(3, 4, seed=seed) for seed in range(6)])
    for statistic in (center_of_mass, spread, entropy, mean_distance, translation_consistency, mirror_symmetry):
        together = statistic(maps.unflatten(0, (2, 3)))
        torch.testing.assert_close(together, torch.stack([statistic(m) for m in maps]).unflatten(0, (2, 3)))
        torch.testing.assert_close(statistic(maps.half()).double().view_as(together), together, rtol=0, atol=0.01)
        with pytest.raises(ValueError, match=r'maps of shape \[3, 4, 4, 3\]'):
            statistic(torch.ones(3, 4, 4, 3))


@pytest.mark.parametrize('dim', [-5, 0])
def test_overlap_is_1_less_the_mean_distance_of_pairs(dim):
    """Of the heads of a layer, or of the images of a batch."""
    maps = random_maps(4, 3, 4, 5)
    distances = [(a - b).abs().sum((-2, -1)) / 2 for a, b in itertools.combinations(maps.unbind(dim), 2)]
    torch.testing.assert_close(overlap(maps, dim), 1 - sum(distances) / len(distances))
    for wrong, along in ((maps.narrow(dim, 0, 1), dim), (maps, -1), (maps[0, 0], -5)):
        with pytest.raises(ValueError, match=rf'maps of shape .* at least two along dimension {along}'):
            overlap(wrong, along)
