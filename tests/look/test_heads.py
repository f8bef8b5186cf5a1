import pytest
import timm
import torch
from PIL import Image

from drawn import SMALL, set_heads
from timm_selfconv.look.heads import format_heads, report_heads
from timm_selfconv.theory import tap_offsets

IMAGES = [Image.new('RGB', (32, 32), 'white'), Image.linear_gradient('L').resize((32, 32)).convert('RGB')]


def convolutional_net(num_heads=9, **kwargs):
    """Make a net with two layers: sharp heads at the taps of a 3 x 3 kernel, then flat heads."""
    net = timm.create_model('sa_quadratic_cifar', num_heads=num_heads, **dict(SMALL, **kwargs))
    set_heads(net.blocks[0], tap_offsets(3)[:num_heads], 9.)
    set_heads(net.blocks[1], net.blocks[1].attn.encoding.centers, 0.)
    return net


def test_a_convolution_and_its_contrary_in_numbers_and_in_text():
    first, second = layers = report_heads(convolutional_net())
    assert first.residual < 1e-9 and first.shared_residual < 1e-9
    assert first.taps == [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)] == first.kernel.taps
    assert first.kernel.residual < 1e-9 and second.kernel.residual is None
    for head, tap in zip(first.heads, first.taps):
        assert head.acts_as_tap and head.nearest_tap == tap and head.on_tap == pytest.approx(1.)
        assert head.center == pytest.approx(tap, abs=1e-6)
        assert head.largest == pytest.approx(1.) and head.entropy < 1e-6 and head.spread < 1e-6
        assert head.distance == pytest.approx((tap[0] ** 2 + tap[1] ** 2) ** 0.5, abs=1e-6)
        assert head.consistency is None and head.symmetry == pytest.approx(
                (float(tap[1] == 0), float(tap[0] == 0)), abs=1e-6)

    keys = 16 * 16
    assert second.residual == pytest.approx(1 - 1 / keys, abs=1e-5)
    assert second.taps == [] and not any(head.acts_as_tap for head in second.heads)
    for head in second.heads:
        assert head.center == pytest.approx((0., 0.), abs=1e-4)  # inside the border, on average
        assert head.spread == pytest.approx((2 * (16 ** 2 - 1) / 12) ** 0.5)
        assert head.largest == pytest.approx(1 / keys) and head.on_tap == pytest.approx(1 / keys)

    lines = format_heads(layers, 3).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert lines[2].split() == '0 0 -1.00, -1.00 0.00 1.41 0.00 1.00 0.00, 0.00 1.00 (-1,-1)'.split()
    tables = '\n'.join(lines).split('\n\n')[:3]
    heads, summary, kernels = ([row.split() for row in table.splitlines()] for table in tables)
    assert len(heads) == 2 + 18 and summary[2][:5] == ['0', '0.000', '0.000', '1.07', '0.00']
    assert summary[2][5:9] == ['9', 'of', '9', '(-1,-1)'] and summary[-1][5:] == ['0', 'of', '9', 'none']
    assert kernels[2][:7] == ['0', '9', 'of', '9', '1.41', '0.000', '(-1,-1)']


def test_taps_are_counted_once_and_others_left_out():
    net = convolutional_net(num_heads=5)
    set_heads(net.blocks[0], [[0, 1], [0, 1], [-1, -1], [0, 3], [0.5, 0]], 9.)
    first = report_heads(net)[0]
    assert [head.acts_as_tap for head in first.heads] == [True, True, True, False, False]
    assert first.taps == [(-1, -1), (0, 1)]
    assert first.heads[4].on_tap == pytest.approx(0.5)  # between two pixels
    assert first.residual == pytest.approx((9 - 3) / 9, abs=1e-6)  # half of either of these two
    assert first.kernel.taps == [(-1, -1), (0, 1), (0, 3)] and first.kernel.reach == 3.
    wider = report_heads(net, kernel_size=7)[0]
    assert wider.taps == [(-1, -1), (0, 1), (0, 3)] and wider.heads[3].acts_as_tap


def test_inputs():
    assert report_heads(convolutional_net().bfloat16(), IMAGES)[0].residual < 1e-9
    net = convolutional_net(img_size=(12, 16), in_chans=1).bfloat16()
    assert report_heads(net)[1].heads[0].largest == pytest.approx(1 / (6 * 8))
    with pytest.raises(ValueError, match='kernel_size=7: needs a kernel that fits in a grid of 6 x 8'):
        report_heads(net, kernel_size=7)
    net = timm.create_model('sa_quadratic_cifar', num_heads=2, terms=('key_bias', 'position'), **SMALL)
    with pytest.raises(ValueError, match='images: needs at least one picture'):
        report_heads(net)


def test_gates_of_convit():
    net = timm.create_model('convit_tiny', patch_size=32, embed_dim=8, depth=3, local_up_to_layer=2)
    net.blocks[0].attn.gating_param.data.fill_(-2.)
    net.blocks[0].attn.pos_proj.weight.data.copy_(torch.tensor([[0., -100., -50.]]))  # the pixel above
    layers = report_heads(net, IMAGES)
    assert [layer.heads[0].gate is None for layer in layers] == [False, False, True]
    head = layers[0].heads[0]
    assert head.gate == pytest.approx(1 / (1 + 2.718281828 ** 2))
    assert head.nearest_tap == (-1, 0) and head.gate < head.on_tap < 0.5  # the rest goes to content
    lines = format_heads(layers, 3).splitlines()
    assert 'gate' in lines[0].split() and lines[2].split()[4] == '0.12'


def test_numbers_are_means_over_pictures():
    net = timm.create_model('sa_learned_content_cifar', num_heads=2, **dict(SMALL, depth=1))
    net.blocks[0].attn.query.weight.data.mul_(20.)  # sharp enough to depend on pictures
    (both,), *each = (report_heads(net, images) for images in (IMAGES, IMAGES[:1], IMAGES[1:]))
    alone = [layer for layer, in each]
    assert both.residual == pytest.approx(sum(one.residual for one in alone) / 2)
    assert both.shared_residual >= sum(one.shared_residual for one in alone) / 2
    for name in ('center', 'spread', 'distance', 'entropy', 'largest', 'consistency', 'symmetry'):
        mean, *values = (torch.tensor([getattr(head, name) for head in layer.heads]) for layer in (both, *alone))
        torch.testing.assert_close(mean, sum(values) / 2)
        assert not torch.allclose(*values, rtol=1e-3)
    assert all(0 < head.constancy < 1 for head in both.heads) and alone[0].heads[0].constancy is None
