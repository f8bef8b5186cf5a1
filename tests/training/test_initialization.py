"""Whitening, against its definition."""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from timm_selfconv.training.initialization import whiten_stem


@pytest.fixture
def images():
    """Correlated channels and neighbours, not centred."""
    noise = torch.randn(200, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    mixed = torch.einsum('dc,bcij->bdij', torch.tensor([[1., 0.8, 0.5], [0., 1., 0.9], [0., 0., 2.]]), noise)
    return F.avg_pool2d(mixed, 2, 1) + 0.7


@pytest.mark.parametrize('conv', [
    nn.Conv2d(3, 96, 4, 4), nn.Conv2d(3, 12, 2, 2), nn.Conv2d(3, 7, 2, 2), nn.Conv2d(3, 40, 3, 1, 1)])
def test_channels_are_white_and_of_the_scale(conv, images):
    """Of n components, D channels: covariance ``scale^2 D / n`` on an n-dimensional subspace, or the unit matrix."""
    torch.manual_seed(0)
    whiten_stem(conv.double(), images, 0.5, eps=0.)
    out = conv(images.double()).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), torch.zeros(len(out), dtype=torch.double), rtol=0, atol=1e-10)
    components = min(len(out), conv.weight[0].numel())
    variances = torch.linalg.eigvalsh(out.cov()).flip(0)
    wanted = torch.zeros(len(out), dtype=torch.double)
    wanted[:components] = 0.25 * len(out) / components
    torch.testing.assert_close(variances, wanted, rtol=1e-5, atol=1e-6)  # the mixing matrix is float32
    assert out.square().mean() == pytest.approx(0.25, rel=2e-3)  # of finitely many patches


def test_directions_without_variance_stay_finite(images):
    conv = nn.Conv2d(3, 16, 2, 2)
    whiten_stem(conv, images[:, :1].expand(-1, 3, -1, -1), 1.)  # grey: two of three colours tell nothing new
    assert conv.weight.isfinite().all() and conv.weight.abs().max() < 5e-4 ** -0.5 * 2


def test_grouped_convolutions_are_refused(images):
    with pytest.raises(ValueError, match='groups=3: whitening needs'):
        whiten_stem(nn.Conv2d(3, 3, 2, groups=3), images, 1.)
