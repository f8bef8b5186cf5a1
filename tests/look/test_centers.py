import io
import itertools
import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import example, given, settings, strategies as st
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.path import Path
from PIL import Image

from drawn import SMALL, heads_of, quadratic_net, texts
from timm_selfconv.look import figures
from timm_selfconv.theory import Blobs, position_blobs
from timm_selfconv.weights.history import write_history


def test_radius_holds_its_share_of_a_gaussian():
    assert figures.mass_radius(0.5) == pytest.approx(1.1774100)  # sqrt(2 ln 2)
    assert figures.mass_radius(0.9) == pytest.approx(2.1459660)  # sqrt(2 ln 10)
    for mass in (0., 1., -1):
        with pytest.raises(ValueError, match=f'mass={mass!r}: needs a number between 0 and 1'):
            figures.mass_radius(mass)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.1, 9.), st.floats(0.1, 9.), st.floats(-3.1, 3.1))
def test_ellipse_of_a_turned_gaussian(first, second, angle):
    """Half-axes are the radius over the roots of the precision's eigenvalues; density is equal along the ellipse."""
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
    precision = turn @ torch.diag(torch.tensor([first, second]).double()) @ turn.T
    long, short, tilt = figures.mass_ellipse(precision.inverse(), 0.9)
    radius = math.sqrt(2 * math.log(10))
    assert long == pytest.approx(radius / math.sqrt(min(first, second)), rel=1e-6)
    assert short == pytest.approx(radius / math.sqrt(max(first, second)), rel=1e-6)
    for t in (0., 1., 2.5, 4.):
        along, across = long * math.cos(t), short * math.sin(t)
        col = along * math.cos(tilt) - across * math.sin(tilt)
        row = along * math.sin(tilt) + across * math.cos(tilt)
        point = torch.tensor([row, col]).double()
        assert float(point @ precision @ point) == pytest.approx(radius ** 2, rel=1e-6)


def test_drawn_circles_are_the_encodings_gaussians():
    blobs = position_blobs(quadratic_net())
    torch.testing.assert_close(blobs[1].covariances, torch.stack([4 * torch.eye(2), 0.25 * torch.eye(2)]).double())
    figure = figures.figure_centers(blobs, (8, 10), 'a net')
    assert len(figure.axes) == 2 and texts(figure)[1].startswith('a net\n')
    for ax in figure.axes:
        border, = (p for p in ax.patches if isinstance(p, Rectangle))
        assert (*border.get_xy(), border.get_width(), border.get_height()) == (-5.5, -4.5, 10, 8)  # query in (4, 5)
        ellipses = [p for p in ax.patches if isinstance(p, Ellipse)]
        half, most = figures.mass_radius(0.5), figures.mass_radius(0.9)
        assert [e.center for e in ellipses] == [(-2., 1.)] * 2 + [(0.5, 3.)] * 2  # column first, as axes have it
        for ellipse, radius in zip(ellipses, (2 * half, 2 * most, half / 2, most / 2)):
            assert ellipse.width == pytest.approx(2 * radius) and ellipse.height == pytest.approx(2 * radius)
        query, *dots = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in ax.lines]
        assert query == (0., 0.) and dots == [(-2., 1.), (0.5, 3.)]
        assert ax.get_ylim()[0] > ax.get_ylim()[1]  # rows run downwards
        assert ax.get_xlim()[0] < -2 and ax.get_ylim()[0] > 3


def test_circles_end_at_the_grid_and_centres_outside_stand_at_the_edge():
    blobs = Blobs(torch.tensor([[0., 3.], [-2., 40.]]).double(), 4 * torch.eye(2).double().expand(2, 2, 2))
    figure = figures.figure_centers([blobs], (8, 8))
    ax, = figure.axes
    _, inside, outside = ax.lines
    assert inside.get_fillstyle() == 'full' and outside.get_fillstyle() == 'none'
    assert (outside.get_xdata()[0], outside.get_ydata()[0]) == (ax.get_xlim()[1], -2.)
    figure.savefig(pixels := io.BytesIO(), format='png', dpi=200)
    drawn = np.asarray(Image.open(pixels).convert('RGB')).astype(int)
    violet = np.abs(drawn - [0x33, 0x22, 0x88]).max(-1) < 40
    figure.draw_without_rendering()
    right = (ax.transData.transform((3.5, 0))[0]) / figure.dpi * 200
    left = (ax.transData.transform((-4.5, 0))[0]) / figure.dpi * 200
    above_legend = violet[:int(0.8 * len(violet))]
    assert above_legend[:, int(left):int(right) - 12].any() and not above_legend[:, int(right) + 12:].any()


def test_drawn_ellipses_are_the_full_precisions():
    blobs, _ = position_blobs(quadratic_net('quadratic_gen'))
    root = torch.tensor([[2., 1.], [0., 1.]]).double()
    torch.testing.assert_close(blobs.covariances[0].inverse(), root @ root.T)
    flat = blobs.covariances[1]
    assert flat[0, 0].item() == pytest.approx(1.) and flat[1, 1].item() == pytest.approx(1e8)
    ellipse = next(p for p in figures.figure_centers([blobs], (8, 8)).axes[0].patches if isinstance(p, Ellipse))
    eigenvalues, vectors = np.linalg.eigh((root @ root.T).numpy())
    assert ellipse.width == pytest.approx(2 * figures.mass_radius(0.5) / math.sqrt(eigenvalues[0]))
    assert ellipse.height == pytest.approx(2 * figures.mass_radius(0.5) / math.sqrt(eigenvalues[1]))
    direction = math.radians(ellipse.angle)
    along = np.array([math.sin(direction), math.cos(direction)])  # row, column
    assert abs(along @ vectors[:, 0]) == pytest.approx(1.)


@example(1, 2, 2.220446049250313e-16, 0.5, 1)  # two adjacent floating point numbers
@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0., 30.), st.floats(0.05, 0.95), st.integers(0, 2 ** 31))
def test_the_region_is_the_fewest_pixels_that_hold_the_share(height, width, gain, mass, seed):
    scores = gain * torch.randn(height, width, generator=torch.Generator().manual_seed(seed)).double()
    attention = scores.flatten().softmax(0).view(height, width)
    inside = attention[attention >= figures.density_level(attention, mass)]
    assert inside.sum() >= mass - 1e-12 and inside[inside > inside.min()].sum() < mass


def test_drawn_lines_are_around_the_pixels_of_the_region():
    torch.manual_seed(0)
    maps = (3 * torch.randn(2, 4, 5, 20)).softmax(-1).view(2, 4, 5, 4, 5)
    ax, = figures.figure_regions([maps], (3, 1), 'small; ', 'a net').axes
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines[1:]]
    assert ax.get_ylim()[0] > ax.get_ylim()[1] and len(ax.collections) == 2
    for attention, lines, dot in zip(maps[:, 3, 1], ax.collections, dots):
        rings = [Path(polygon) for path in lines.get_paths() for polygon in path.to_polygons()]
        held = 0.
        for i in range(4):
            for j in range(5):
                inside = sum(ring.contains_point((j - 1, i - 3)) for ring in rings) % 2 == 1
                assert inside == bool(attention[i, j] >= figures.density_level(attention, 0.5))
                held += float(attention[i, j]) if inside else 0.
        assert held >= 0.5
        assert attention[round(dot[1]) + 3, round(dot[0]) + 1] == attention.max()


def test_heads_that_look_everywhere_are_told_from_heads_that_look_at_one_pixel():
    wide, sharp = 1e4 * torch.eye(2), 0.01 * torch.eye(2)
    blobs = Blobs(torch.zeros(4, 2).double(), torch.stack([wide, sharp, wide, sharp]).double())
    uniform, point = torch.full((8, 8), 1 / 64), torch.zeros(8, 8)
    point[4, 4] = 1.
    maps = torch.stack([uniform, point, uniform, point])[:, None, None].expand(-1, 8, 8, -1, -1)
    for figure in (figures.figure_centers([blobs], (8, 8)), figures.figure_regions([maps])):
        ax, = figure.axes
        assert [text.get_text() for text in ax.texts] == ['1', '3', 'everywhere: 0, 2']
        assert len([p for p in ax.patches if isinstance(p, Ellipse)]) + 2 * len(ax.collections) == 4


def test_numbers_of_near_heads_do_not_overlap():
    centers = torch.tensor([[row, col] for row in (-0.4, 0., 0.4) for col in (-0.5, 0., 0.5)]).double()
    figure = figures.figure_centers([Blobs(centers, 4 * torch.eye(2).double().expand(9, 2, 2))] * 6, (16, 16))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().shrunk(0.8, 0.6) for text in figure.axes[0].texts]  # without gaps
    assert len(boxes) == 9 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_offsets_beside_narrow_panels_stand_apart():
    figure = figures.figure_training(dict.fromkeys(range(6), position_blobs(quadratic_net())), (8, 8))
    figure.set_dpi(180)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[-1].get_xticklabels()]
    assert all(left.x1 + 4 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize('encoding', ['quadratic', 'quadratic_gen', 'learned'])
def test_a_history_has_the_gaussians_of_every_epoch(tmp_path, encoding):
    torch.manual_seed(0)
    net = timm.create_model('sa_quadratic_cifar', num_heads=2, encoding=encoding, **SMALL)
    rows, wanted = [], []
    for epochs in range(8):
        rows.append(dict(epochs=epochs, train_loss=1., heads=heads_of(net, (16, 16))))
        wanted.append(position_blobs(net, (16, 16)))
        net.init_weights()
    write_history(tmp_path / 'history.json', 'sa_quadratic_cifar', [16, 16], rows)
    blobs, grid = figures.training_blobs(net, tmp_path, columns=4)
    assert grid == (16, 16) and list(blobs) == [0, 1, 3, 7]  # heads move most at first
    for epochs, layers in blobs.items():
        for layer, there in zip(layers, wanted[epochs], strict=True):
            torch.testing.assert_close(layer.centers, there.centers, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(layer.covariances, there.covariances, rtol=1e-9, atol=1e-12)
    assert list(figures.training_blobs(net, tmp_path, columns=2)[0]) == [0, 7]
    assert list(figures.training_blobs(net, tmp_path, columns=1)[0]) == [7]
    other = timm.create_model('sa_quadratic_cifar', num_heads=3, encoding=encoding, **SMALL)
    with pytest.raises(ValueError, match=r'history.json: belongs to the net'):
        figures.training_blobs(other, tmp_path)


def test_a_training_is_drawn_by_layers_and_epochs(tmp_path, monkeypatch):
    net = quadratic_net()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run='\.': needs a net with a shipped history, or a folder"):
        figures.training_blobs(net, '.')
    rows = [dict(epochs=i * 0.3328, train_loss=1., heads=heads_of(net, (16, 16))) for i in range(4)]
    write_history(tmp_path / 'history.json', 'sa_quadratic_cifar', [16, 16], rows)
    figure = figures.draw_figures(net, net='other', run='.')['training']
    assert [ax.get_title() for ax in figure.axes[:3]] == ['untrained', '0.333 epochs', '0.666 epochs']
    assert len(figure.axes) == 2 * 4  # layers, epochs
    assert [ax.lines[1].get_xdata()[0] for ax in figure.axes[:4]] == [-2.] * 4
    assert texts(figure)[1].startswith('other; training of .\n')


def test_a_history_without_heads_cannot_be_drawn(tmp_path):
    write_history(tmp_path / 'history.json', 'a_net', None, [
        dict(epochs=0, heads=None), dict(epochs=1, train_loss=1., heads=None)])
    with pytest.raises(ValueError, match=r'history.json: has no positions of heads: the attention of a_net depends'):
        figures.training_blobs(quadratic_net(), tmp_path)
