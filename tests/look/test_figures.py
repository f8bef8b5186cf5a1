import importlib
import itertools
import math
import re
import sys

import matplotlib
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from matplotlib.patches import Circle, Rectangle

from drawn import SMALL, assert_drawn, panels, quadratic_net, set_heads, texts
from head_maps import random_maps
from timm_selfconv.look import attention_maps as maps_module, figures
from timm_selfconv.look.heads import report_heads
from timm_selfconv.theory import convs_to_attention
from timm_selfconv.weights.history import write_history


def test_averages_are_what_a_key_receives_from_all_queries():
    maps = random_maps(9, 5, 5) / 10
    maps[0, ..., 0, 0] += 0.9  # one corner does not darken the rest
    average = sum(maps[:, i, j] for i in range(5) for j in range(5)) / 25
    figure = figures.figure_average([maps])
    assert_drawn(panels(figure), average)
    assert all(image.get_clim()[1] < 0.5 for image in figure.axes[0].images)
    assert 'the largest 1 % share its end' in figure.axes[1].get_xlabel()
    assert any(text.startswith('.9') for text in texts(figure.axes[0]))


def test_windows_end_at_the_grid():
    maps = random_maps(1, 3, 4)
    around = F.pad(maps[:, 0, 3], (2,) * 4, value=math.nan)
    assert_drawn(panels(figures.figure_query([maps], (0, 3), 5)), around[:, :5, 3:8])
    assert_drawn(panels(figures.figure_query([maps])), maps[:, 1, 2])  # the middle, the whole grid
    for query in ((3, 0), (0, 4), (-1, 0)):
        with pytest.raises(ValueError, match=r'query=.*needs a row and a column on the grid of 3 x 4'):
            figures.figure_query([maps], query)
    for window in (0, 4, -1):
        with pytest.raises(ValueError, match=f'window={window}: needs an odd number'):
            figures.figure_query([maps], window=window)


def test_the_most_local_head_comes_first():
    maps = torch.zeros(3, 5, 5, 5, 5)
    maps[[0, 1, 2], :, :, [0, 2, 2], [0, 2, 3]] = 1.  # from (2, 2): far, here, next
    figure = figures.figure_query([maps], window=3)
    drawn = panels(figure)
    assert drawn[0][1, 1] == 1. and drawn[1][1, 2] == 1. and drawn[2].sum() == 0.
    assert texts(figure.axes[0]) == ['layer 0', '1', '1.00', '2', '1.00', '0', '.000']


def test_the_query_is_framed_in_the_picture_and_in_maps_over_it():
    maps, picture = random_maps(3, 3, 4), torch.rand(6, 8, 3)
    figure = figures.figure_query([maps[:2], maps[2:]], (2, 1), picture=picture, over=True)
    assert 'row 2, column 1' in texts(figure)[0]
    top, ax, _ = figure.axes
    np.testing.assert_array_equal(top.images[0].get_array(), picture)
    most = maps[:, 2, 1].max()
    frames = zip(ax.images[::2], ax.images[1::2], ax.patches[2::3], maps[:, 2, 1], strict=True)
    for grey, over, mark, expected in frames:  # light, for readable text; transparent without attention
        left, right, bottom, above = over.get_extent()
        h, w = bottom - above, right - left
        assert mark.get_bbox().bounds == pytest.approx((left + w / 4, above + h * 2 / 3, w / 4, h / 3))
        np.testing.assert_allclose(grey.get_array(), 0.45 + 0.55 * picture.mean(-1), rtol=1e-6)
        np.testing.assert_allclose(over.get_alpha(), (expected / most).sqrt(), rtol=1e-6)


def test_all_panels_have_one_scale_and_do_not_overlap():
    """The scale goes from zero to the largest value of all heads, so a flat head is dark next to a sharp one."""
    maps = [random_maps(24, 3, 4), torch.full((1, 3, 4, 3, 4), 1 / 12)]  # the first layer in two lines
    most = max(layer[:, 1, 2].max().item() for layer in maps)
    ax, bar = figures.figure_query(maps).axes
    shares = [text for text in texts(ax) if '.' in text]
    for image, share, layer in zip(ax.images, shares, torch.cat(maps), strict=True):
        assert image.get_clim() == (0., pytest.approx(most))
        assert float(share) == pytest.approx(layer[1, 2].max().item(), abs=0.006)
    assert bar.get_xlim() == (0., pytest.approx(most))
    assert [label.get_text() for label in bar.get_xticklabels()][::4] == ['0', f'{most:.2g}']
    boxes = [image.get_window_extent() for image in ax.images]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def write_summary(folder, *rows):
    folder.mkdir(exist_ok=True)
    (folder / 'summary.csv').write_text('\r\n'.join(['epoch,train_loss,eval_top1', *rows]))


def test_curves_of_runs_by_name(tmp_path):
    # the last row of a resumed epoch counts; epochs without validation are left out
    write_summary(tmp_path / 'a', '0,2.0,40.0', '1,1.5,55.0', '1,1.4,56.0', '2,1.3,')
    for seed, top1, loss in (42, 50., 1.), (43, 56., 2.):
        rows = [dict(epochs=0, heads=None), dict(epochs=1, train_loss=loss, eval_top1=top1, heads=None)]
        write_history(tmp_path / f'b.{seed}.history.json', 'b', None, rows)
    curves = figures.read_curves([tmp_path / 'a', *(tmp_path / f'b.{seed}.history.json' for seed in (42, 43))])
    assert curves['a'] == [dict(eval_top1={1: 40., 2: 56.}, train_loss={1: 2., 2: 1.4, 3: 1.3})]
    figure = figures.figure_accuracy(curves)
    accuracy, loss = figure.axes
    assert [[list(x) for x in line.get_data()] for line in accuracy.lines] == [[[1, 2], [40., 56.]], [[1], [53.]]]
    assert [list(line.get_ydata()) for line in loss.lines] == [[2., 1.4, 1.3], [1.5]]
    band = accuracy.collections[1].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (50., 56.)
    assert texts(figure.legends[0]) == ['a: 56.0 %', 'b: 53.0 % (50.0 to 56.0, 2 runs)']


def test_curves_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r'needs a net with a shipped history, or a folder with history\.json or'):
        figures.read_curve(tmp_path)
    for rows, message in ([], 'has no validation accuracy'), (['0,1.0,n/a'], 'needs numbers in columns epoch and'):
        write_summary(tmp_path, *rows)
        with pytest.raises(ValueError, match=rf'summary\.csv: {message}'):
            figures.read_curve(tmp_path)
    for seed, *rows in (42, '0,2.0,40.0'), (43, '0,2.0,40.0', '1,1.5,50.0'):
        write_summary(tmp_path / f'b.{seed}', *rows)
    with pytest.raises(ValueError, match=r'b\.43: has eval_top1 after epochs \[1, 2\], but .* after epochs \[1\]'):
        figures.read_curves([tmp_path / 'b.42', tmp_path / 'b.43'])
    (tmp_path / 'b.44.history.json').write_text('[]')
    with pytest.raises(ValueError, match=r'b\.44\.history\.json: is no history'):
        figures.read_curves([tmp_path / 'b.44.history.json'])


def test_taps_are_squares_of_their_attention_and_other_heads_circles():
    net = quadratic_net()
    set_heads(net.blocks[0], [[1., -2.], [3., 0.]], [9., 2.])
    layers = report_heads(net)
    figure = figures.figure_kernels(layers)
    first, second = figure.axes
    kernel, *squares = [patch for patch in first.patches if isinstance(patch, Rectangle)]
    assert (kernel.get_xy(), kernel.get_width(), kernel.get_height()) == ((-1.5, -1.5), 3, 3)
    for square, (row, col), head in zip(squares, ((1, -2), (3, 0)), layers[0].kernel.heads, strict=True):
        assert square.get_width() * square.get_height() == pytest.approx(head.mean)
        assert square.get_center() == pytest.approx((col, row))
    assert texts(first) == ['0', '1'] and first.get_title() == 'layer 0: 2 of 2 heads, 2 offsets'
    circle = next(patch for patch in second.patches if isinstance(patch, Circle))
    assert circle.center == layers[1].heads[0].center[::-1] and circle.radius == layers[1].heads[0].spread
    assert all(ax.get_ylim() == (4.5, -4.5) for ax in figure.axes)  # rows downwards


def test_position_only_nets_need_no_images():
    net = quadratic_net()
    drawn = figures.draw_figures(net, net='quadratic: 3 epochs')
    assert all('quadratic: 3 epochs' in texts(figure)[1] for figure in drawn.values())
    assert list(drawn) == ['centers', 'attention', 'attention-7x7', 'average', 'kernels']
    expected = maps_module.attention_maps(net, torch.zeros(1, 3, 32, 32))
    assert_drawn(panels(drawn['attention']), torch.cat([m[0, :, 8, 8] for m in expected]))
    for names in ['cat', 'cat'], ['7x7']:
        with pytest.raises(ValueError, match='needs a different name for each image, and not 7x7'):
            figures.draw_figures(net, torch.zeros(2, 3, 32, 32), names)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_learned_content_hier_cifar', dict(SMALL, num_heads=2, img_size=16)),
    ('vit_tiny_patch16_224', dict(img_size=64, depth=2))])
def test_nets_that_look_at_content_get_means_and_single_images(name, kwargs):
    net, size = timm.create_model(name, **kwargs).eval(), kwargs['img_size']
    with pytest.raises(ValueError, match='images: needs at least one picture'):
        figures.draw_figures(net)
    images = torch.randn(9, 3, size, size)
    drawn = figures.draw_figures(net, images, ['cat'], query=(1, 2))
    assert list(drawn) == ['centers', 'attention', 'attention-7x7', 'average', 'kernels',
                           'attention-cat', 'overlay-cat', 'average-cat']
    all_maps = maps_module.attention_maps(net, images)
    assert_drawn(panels(drawn['attention']), torch.cat([m.mean(0)[:, 1, 2] for m in all_maps]))
    assert 'mean over 9 images' in texts(drawn['attention'])[1]
    picture, *single = panels(drawn['attention-cat'])
    std, mean = (torch.tensor(net.pretrained_cfg[key]) for key in ('std', 'mean'))
    np.testing.assert_allclose(picture, (images[0].permute(1, 2, 0) * std + mean).clamp(0, 1), rtol=1e-5)
    assert_drawn(single, torch.cat([m[0, :, 1, 2] for m in all_maps]))


def test_layers_of_several_grids_are_asked_at_one_place_of_the_picture():
    sizes = dict(img_size=(48, 80), embed_dim=12, depths=(1, 2), num_heads=(2, 3), window_size=4)
    net, images = timm.create_model('swin_tiny_patch4_window7_224', **sizes).eval(), torch.randn(1, 3, 48, 80)
    drawn = figures.draw_figures(net, images, query=(5, 19))
    fine, coarse, last = maps_module.attention_maps(net, images)
    assert_drawn(panels(drawn['attention']), [*fine[0, :, 5, 19], *coarse[0, :, 2, 9], *last[0, :, 2, 9]])
    assert [ax.get_xlim() for ax in drawn['centers'].axes] == [(-20., 1.), *[(-10., 1.)] * 2]
    assert all(ax.get_xticklabels() and ax.get_yticklabels() for ax in drawn['centers'].axes)  # each has its scale
    with pytest.raises(ValueError, match=r'needs a row and a column on the grid of 12 x 20'):
        figures.draw_figures(net, images, query=(5, 20))
    tiny = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1).eval()  # with a grid of 2 x 2
    assert 'kernels' in figures.draw_figures(tiny, images[:, :, :32, :32])

    cnn = timm.create_model('resnet_tiny_cifar', channels=(4, 4, 4, 4), layers=(1, 1, 1, 1)).eval()
    drawn = figures.draw_figures(convs_to_attention(cnn, 'layer3', alpha=3.)[0])
    assert len(panels(drawn['attention'])) == 9 + 9 + 1
    assert [ax.get_xlim() for ax in drawn['centers'].axes] == [(-9.75, 8.75), (-5.75, 4.75), (-9.75, 8.75)]


@pytest.mark.parametrize('name,neutral,rows', [
    ('san_patchwise_hier_cifar', 0., ['pass 0, block 0', 'pass 1, block 0']),
    ('san_pairwise_cifar', 1 / 9, ['bottleneck 0', 'bottleneck 1'])])
def test_vector_attention_gets_footprints_about_their_neutral_weight(name, neutral, rows):
    net, images = timm.create_model(name, channels=(544, 544), depths=(1, 1)).eval(), torch.randn(9, 3, 8, 8)
    with pytest.raises(ValueError, match='images: needs at least one picture'):
        figures.draw_figures(net)
    figure, = figures.draw_figures(net, images).values()
    weights = [w.mean((0, 2, 3)) for w in maps_module.footprint_weights(net, images)]
    assert_drawn(panels(figure), torch.cat([layer[:16] for layer in weights]))
    assert 'the first 16' in texts(figure)[1] and [t for t in texts(figure.axes[0]) if ' ' in t] == rows
    low, high = figure.axes[0].images[0].get_clim()
    assert (low + high) / 2 == pytest.approx(neutral)
    assert high - neutral == pytest.approx((torch.cat(weights) - neutral).abs().max().item())


@pytest.mark.parametrize('ending,start', [('png', b'\x89PNG'), ('svg', b'<?xml'), ('pdf', b'%PDF')])
def test_files_are_the_same_every_time_and_never_replaced(tmp_path, ending, start):
    before, files = dict(matplotlib.rcParams), [tmp_path / f'{name}.{ending}' for name in 'ab']
    for file in files:
        figures.save_figure(figures.figure_average([random_maps(1, 2, 2)]), file)
    assert dict(matplotlib.rcParams) == before
    other = figures.figure_average([random_maps(2, 2, 2)])
    with pytest.raises(FileExistsError, match='exists'):
        figures.save_figure(other, files[0])
    with pytest.raises(ValueError, match=r'path=.*needs one of the endings \.png, \.svg, \.pdf'):
        figures.save_figure(other, tmp_path / 'a.bmp')
    content, again = (file.read_bytes() for file in files)
    assert content.startswith(start) and again == content and len(list(tmp_path.iterdir())) == 2


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    monkeypatch.delitem(sys.modules, 'timm_selfconv.look.figures')
    with pytest.raises(ImportError, match=re.escape("pip install 'timm_selfconv[figures]'")):
        importlib.import_module('timm_selfconv.look.figures')
