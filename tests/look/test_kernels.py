import pytest
import torch
from matplotlib.patches import Circle, Rectangle

from drawn import quadratic_net, texts
from timm_selfconv.look import figures
from timm_selfconv.look.heads import report_heads


def test_taps_are_squares_of_their_attention_and_other_heads_circles():
    net = quadratic_net()
    with torch.no_grad():
        net.blocks[0].attn.encoding.centers.copy_(torch.tensor([[1., -2.], [3., 0.]]))
        net.blocks[0].attn.encoding.spreads.copy_(torch.tensor([9., 2.]))
    layers = report_heads(net)
    figure = figures.figure_kernels(layers, net='quadratic')
    assert texts(figure)[1].startswith('quadratic')
    first, second = figure.axes
    kernel, *squares = [patch for patch in first.patches if isinstance(patch, Rectangle)]
    assert (kernel.get_xy(), kernel.get_width(), kernel.get_height()) == ((-1.5, -1.5), 3, 3)
    for square, (row, col), head in zip(squares, ((1, -2), (3, 0)), layers[0].kernel.heads, strict=True):
        assert square.get_width() * square.get_height() == pytest.approx(head.mean)
        assert square.get_center() == pytest.approx((col, row))
    assert [text.get_text() for text in first.texts] == ['0', '1']
    assert first.get_title() == 'layer 0: 2 of 2 heads, 2 offsets'
    circle = next(patch for patch in second.patches if isinstance(patch, Circle))
    assert circle.center == layers[1].heads[0].center[::-1] and circle.radius == layers[1].heads[0].spread
    assert all(ax.get_ylim() == (4.5, -4.5) for ax in figure.axes)  # rows downwards
