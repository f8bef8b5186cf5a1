"""Heads as shifts, against dense float64 attention by one-hot maps, and against convolutions."""
import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from drawn import set_heads
from head_maps import shift_maps
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.theory import ShiftAttention2d, learned_kernels, to_shifts, with_shifts
from tiny_nets import noise, random_net

OFFSETS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=3)


def sharp_net(offsets, encoding='quadratic', **kwargs):
    """A net in float64: its first layer is one-hot to 1e-15 at offsets, a head each, and its second is not."""
    net = random_net(encoding, num_heads=len(offsets), **kwargs)
    net.pretrained_cfg = dict(input_size=(3, 8, 8))
    set_heads(net.blocks[0], offsets, 30. if encoding == 'quadratic' else 30. * torch.eye(2))
    return net


@settings(deadline=None, max_examples=25)
@given(OFFSETS, st.sets(st.integers(0, 2), min_size=1), st.integers(1, 5), st.integers(1, 6))
def test_a_layer_of_shifts_and_attention_against_dense_maps(offsets, heads, height, width):
    torch.manual_seed(0)
    attn = SelfAttention2d(6, 3, dtype=torch.double).eval()
    x, shifts = noise(2, height, width, 6), [(head, offsets[head]) for head in sorted(heads)]
    maps = attn.attention_probs(x)[0].clone()
    maps[sorted(heads)] = shift_maps([offset for _, offset in shifts], height, width)
    expected = attn.proj(attn.value(torch.einsum('hijkl,bklc->bijhc', maps, x).flatten(3)))  # equation (1)
    torch.testing.assert_close(ShiftAttention2d(attn, shifts)(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('encoding,shared', [('quadratic', False), ('quadratic', True), ('quadratic_gen', False)])
def test_one_hot_maps_convert_exactly_borders_included(encoding, shared):
    """A shared layer runs twice, but has one list of shifts."""
    net, images = sharp_net([(0, 1), (-2, 0), (1, -1), (4, 0)], encoding, hierarchical=shared), noise(2, 3, 8, 8)
    shifted, report = to_shifts(net, 0.9)
    assert report.shifts[0] == [(0, (0, 1)), (1, (-2, 0)), (2, (1, -1)), (3, (3, 0))]  # of 4 rows, 3 reach the end
    assert report.lost[0] == pytest.approx(0., abs=1e-12) and len(report.shifts) == len(net.blocks)
    assert isinstance(shifted.blocks[0].attn, ShiftAttention2d) and shifted.blocks[0].attn.rest is None
    torch.testing.assert_close(shifted(images), net(images), rtol=0, atol=1e-11)


def test_a_layer_of_shifts_is_a_sparse_convolution():
    offsets = [(0, 1), (-2, 0), (1, -1), (1, 2)]
    net, x = sharp_net(offsets), noise(2, 5, 6, 8)
    attn = net.blocks[0].attn
    layer = ShiftAttention2d(attn, list(enumerate(offsets)))
    weight = torch.zeros(8, 8, 5, 5).double()
    for (row, col), own in zip(offsets, attn.value.weight.unflatten(1, (4, 8)).unbind(1)):
        weight[:, :, row + 2, col + 2] = attn.proj.weight @ own
    padded = F.pad(x.permute(0, 3, 1, 2), (2, 2, 2, 2), 'replicate')
    bias = attn.proj(attn.value.bias)
    torch.testing.assert_close(layer(x), F.conv2d(padded, weight, bias).permute(0, 2, 3, 1), rtol=0, atol=1e-11)


def test_the_report_says_what_is_lost():
    """Halfway between two pixels a head gives each half: the shift loses the other half, but none beyond the border."""
    net = sharp_net([(0, 1), (0, 1)])
    net.blocks[0].attn.encoding.centers.data[1, 1] = 0.5 + 1e-9
    report = to_shifts(net, 0.4)[1]
    assert report.shifts[0] == [(0, (0, 1)), (1, (0, 1))]
    assert report.lost[0] == pytest.approx((0. + 0.5 * 3 / 4) / 2, abs=1e-6)  # of 4 columns, the last looks at itself
    assert to_shifts(net, 0.6)[1].shifts[0] == [(0, (0, 1))]
    assert [len(own) for own in to_shifts(net, 0.)[1].shifts] == [2, 2]
    assert learned_kernels(net)[0].heads[0].least == pytest.approx(1.)


def test_weights_train_and_offsets_do_not():
    net = sharp_net([(0, 1), (2, 0)]).train()
    shifted, report = to_shifts(net, 0.9)
    shifted(noise(2, 3, 8, 8)).sum().backward()
    assert shifted.training and all(p.grad is not None for p in shifted.parameters())
    assert not any('offset' in name or 'rest' in name for name, _ in shifted.blocks[0].attn.named_parameters())
    again = with_shifts(sharp_net([(0, 1), (2, 0)], seed=5), report.shifts)
    again.load_state_dict(shifted.state_dict())
    images = noise(2, 3, 12, 8, seed=3)  # another size than the offsets were found on
    torch.testing.assert_close(again.eval()(images), shifted.eval()(images), rtol=0, atol=0)
    exported = torch.export.export(shifted, (images,)).module()
    torch.testing.assert_close(exported(images), shifted(images))


def test_attention_of_convit_by_position_becomes_shifts():
    """Against timm's formula with one-hot maps by position. One head in four is wide and stays."""
    torch.manual_seed(0)
    model = timm.create_model('convit_tiny', img_size=64, embed_dim=8, depth=2, local_up_to_layer=1).double().eval()
    old, offsets = model.blocks[0].attn, [(0, 1), (-2, 0), (3, 3), (0, 0)]
    for head, (row, col) in enumerate(offsets):
        alpha = 0.1 if head == 3 else 2.
        old.pos_proj.weight.data[head] = alpha * torch.tensor([2.2 * col, 2. * row, -1.])
    state, x = copy.deepcopy(model.state_dict()), noise(2, 16, 32)
    shifted, report = to_shifts(model, 0.5)
    assert report.shifts == [list(enumerate(offsets))[:3]] and 0 < report.lost[0] < 0.3
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    query, key = old.qk(x).view(2, 16, 2, 4, 8).permute(2, 0, 3, 1, 4)
    position = old.pos_proj(old.get_rel_indices(16)).permute(0, 3, 1, 2).softmax(-1)
    position[:, :3] = shift_maps(offsets[:3], 4, 4).flatten(3).flatten(1, 2)
    maps = torch.lerp((query @ key.mT * old.scale).softmax(-1), position, old.gating_param.sigmoid()[:, None, None])
    value = old.v(x).view(2, 16, 4, 8).transpose(1, 2)
    torch.testing.assert_close(shifted.blocks[0].attn(x), old.proj((maps @ value).transpose(1, 2).flatten(2)))


def test_other_nets_and_bad_shifts_are_named(small_net):
    for name in ('sa_learned_content_cifar', 'resnet_tiny_cifar'):
        with pytest.raises(ValueError, match='needs SelfAttention2d layers that attend by position only'):
            to_shifts(small_net(name))
    net = small_net('sa_quadratic_cifar')
    once, whole = 'needs heads from 0 to 1, each once', r'shifts=\[.*\]: needs whole offsets'
    for shifts, match in (
            ([[(2, (0, 0))], [], []], once), ([[(0, (0, 0)), (0, (0, 1))], [], []], once),
            ([[(0, (0, 0.5))], [], []], whole), ([[(1, (0,))], [], []], whole),
            ([[]], 'shifts for 1 layers: needs them for 3')):
        with pytest.raises(ValueError, match=match):
            with_shifts(net, shifts)
    with pytest.raises(ValueError, match='threshold=2: needs a number from 0 to 1'):
        to_shifts(net, 2)
