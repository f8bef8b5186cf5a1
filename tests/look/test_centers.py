"""Figures of heads around a query, read back as matplotlib draws them."""
import itertools
import math

import pytest
import timm
import torch
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.path import Path

from drawn import SMALL, quadratic_net, set_heads, texts, write_run
from timm_selfconv.look import figures
from timm_selfconv.look.figures.style import head_style
from timm_selfconv.theory import Blobs, position_blobs
from timm_selfconv.weights.history import write_history


def test_ellipses_hold_half_and_nine_tenths_of_the_encodings_gaussians_and_end_at_the_grid():
    """Along an ellipse the density of the Gaussian is equal; a share 1 - exp(-r^2 / 2) is within r deviations."""
    centers = [[1., -2.], [3., 0.5], [0., -0.5], [-2., 3.], [-2., 40.]]
    roots = [[[2., 1.], [0., 1.]], [[1., -0.6], [0.2, 0.5]], [[0.5, 0.], [0., -0.5]], [[1., 0.], [0., 0.]],
             [[0.5, 0.], [0., 0.5]]]
    net = timm.create_model('sa_quadratic_gen_cifar', num_heads=5, **dict(SMALL, depth=1))
    set_heads(net.blocks[0], centers, roots)
    ax, = figures.figure_centers(position_blobs(net), [(8, 10)]).axes
    border, = (p for p in ax.patches if isinstance(p, Rectangle))
    assert (*border.get_xy(), border.get_width(), border.get_height()) == (-5.5, -4.5, 10, 8)  # query in (4, 5)
    ellipses = [p for p in ax.patches if isinstance(p, Ellipse)]
    shares = itertools.product(zip(centers, roots), (0.5, 0.9))
    for ellipse, ((center, root), share) in zip(ellipses, shares, strict=True):
        assert ellipse.get_clip_box().bounds == border.get_window_extent().bounds
        if root is not roots[3]:  # an infinite stripe
            points = ellipse.get_patch_transform().transform([(math.cos(t), math.sin(t)) for t in range(6)])
            away = (points[:, ::-1] - center) @ root  # row, column
            assert (away ** 2).sum(1) == pytest.approx(-2 * math.log(1 - share))
    query, *dots = [[line.get_ydata()[0], line.get_xdata()[0]] for line in ax.lines]  # column first, as axes have it
    assert query == [0., 0.] and dots == [*centers[:4], [-2., ax.get_xlim()[1]]]  # a centre outside is at the edge
    assert [line.get_fillstyle() for line in ax.lines[1:]] == ['full'] * 4 + ['none']
    assert ax.get_ylim()[0] > 3 and ax.get_ylim()[0] > ax.get_ylim()[1]  # rows run downwards


def test_every_dot_has_its_heads_number_and_colour_and_numbers_do_not_overlap():
    heads = 11  # more than colours
    assert len({head_style(head) for head in range(45)}) == 45
    centers = torch.tensor([[row, col] for row in (-0.4, 0., 0.4, 0.8) for col in (-0.5, 0., 0.5)])[:heads].double()
    blobs = Blobs(centers, 4 * torch.eye(2).double().expand(heads, 2, 2))
    figure = figures.figure_centers([blobs] * 6, [(16, 16)] * 6)
    ax = figure.axes[0]
    for head, (number, dot) in enumerate(zip(ax.texts, ax.lines[1:], strict=True)):
        assert number.get_text() == str(head) and number.xy == (dot.get_xdata()[0], dot.get_ydata()[0])
        assert (dot.get_color(), dot.get_marker()) == head_style(head)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().shrunk(0.8, 0.6) for text in ax.texts]  # without gaps
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_drawn_lines_are_around_the_pixels_of_the_region():
    sharpness = torch.tensor([1., 3., 9., 2.])[:, None, None]
    maps = (sharpness * torch.randn(4, 20, 20)).softmax(-1).view(4, 4, 5, 4, 5)
    ax, = figures.figure_regions([maps], (3, 1), 'small; ', 'a net').axes
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines[1:]]
    assert ax.get_ylim()[0] > ax.get_ylim()[1] and len(ax.collections) == 4
    pixels = list(itertools.product(range(4), range(5)))
    for attention, lines, dot in zip(maps[:, 3, 1], ax.collections, dots):
        rings = [Path(polygon) for path in lines.get_paths() for polygon in path.to_polygons()]
        held = [float(attention[i, j]) for i, j in pixels
                if sum(ring.contains_point((j - 1, i - 3)) for ring in rings) % 2 == 1]
        assert sum(held) >= 0.5 > sum(held) - min(held)
        assert attention[round(dot[1]) + 3, round(dot[0]) + 1] == attention.max()


def test_heads_that_look_everywhere_are_told_from_heads_that_look_at_one_pixel():
    wide, sharp = 1e4 * torch.eye(2), 0.01 * torch.eye(2)
    blobs = Blobs(torch.zeros(4, 2).double(), torch.stack([wide, sharp, wide, 0 * sharp]).double())
    uniform, point = torch.full((8, 8), 1 / 64), torch.zeros(8, 8)
    point[4, 4] = 1.
    maps = torch.stack([uniform, point, uniform, point])[:, None, None].expand(-1, 8, 8, -1, -1)
    for figure in (figures.figure_centers([blobs], [(8, 8)]), figures.figure_regions([maps])):
        ax, = figure.axes
        assert texts(ax) == ['1', '3', 'everywhere: 0, 2']
        assert len([p for p in ax.patches if isinstance(p, Ellipse)]) + 2 * len(ax.collections) == 4


@pytest.mark.parametrize('encoding', ['quadratic', 'quadratic_gen', 'learned'])
def test_a_history_has_the_gaussians_of_every_epoch(tmp_path, encoding):
    net = timm.create_model('sa_quadratic_cifar', num_heads=2, encoding=encoding, **SMALL)
    wanted = write_run(tmp_path, net, (16, 16), range(8), net.init_weights)
    blobs, grid = figures.training_blobs(net, tmp_path)
    assert grid == (16, 16) and list(blobs) == [0, 1, 2, 3, 4, 7]  # heads move most at first
    for epochs, layers in blobs.items():
        torch.testing.assert_close([*map(vars, layers)], [*map(vars, wanted[epochs])], rtol=1e-9, atol=1e-12)


def test_a_training_is_drawn_by_layers_and_epochs(tmp_path, monkeypatch):
    net = quadratic_net()
    write_run(tmp_path, net, (16, 16), [i * 0.3328 for i in range(6)], net.init_weights)
    monkeypatch.chdir(tmp_path)
    figure = figures.draw_figures(net, net='other', run='.')['training']
    assert [ax.get_title() for ax in figure.axes[:3]] == ['untrained', '0.333 epochs', '0.666 epochs']
    assert len(figure.axes) == 2 * 5  # layers, epochs
    assert figure.axes[0].lines[1].get_xdata()[0] == figure.axes[5].lines[1].get_xdata()[0] == -2.
    assert texts(figure)[1].startswith('other; training of .\n')


def test_histories_that_cannot_be_drawn(tmp_path, monkeypatch):
    net = quadratic_net()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run='\.': needs a net with a shipped history, or a folder"):
        figures.training_blobs(net, '.')
    for model in ('sa_learned_cifar', 'sa_quadratic_cifar'):  # another name, then another number of heads
        other = timm.create_model('sa_quadratic_cifar', num_heads=3, **SMALL)
        write_run(tmp_path, other, (16, 16), range(2), name=model)
        with pytest.raises(ValueError, match=rf'history.json: belongs to the net {model}, not to sa_quadratic_cifar'):
            figures.training_blobs(net, tmp_path)
    write_history(tmp_path / 'history.json', 'a_net', None, [
        dict(epochs=0, heads=None), dict(epochs=1, train_loss=1., heads=None)])
    with pytest.raises(ValueError, match=r'history.json: has no positions of heads: the attention of a_net depends'):
        figures.training_blobs(net, tmp_path)
