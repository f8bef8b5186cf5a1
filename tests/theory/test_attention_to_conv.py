import itertools
import math

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from timm.models import reparameterize_model

from lora import Lora
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.theory import attention_to_conv, conv_to_attention, head_kernels, reparameterizable
from tiny_nets import noise, random_net

ENCODINGS = ['quadratic', 'quadratic_gen', 'learned']


def make_layer(encoding='quadratic', dim=4, num_heads=3, grid_size=(9, 9), dtype=torch.float64, seed=0, **kwargs):
    """Make a layer with random parameters that are neither near zero nor symmetric."""
    torch.manual_seed(seed)
    attn = SelfAttention2d(dim, num_heads, encoding=encoding, grid_size=grid_size, dtype=dtype, **kwargs)
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return attn.eval()


def place_heads(attn, centers, spreads):
    with torch.no_grad():
        attn.encoding.centers.copy_(torch.tensor(centers))
        attn.encoding.spreads.copy_(torch.tensor(spreads))
    return attn


def channels_last(conv, x):
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def score(attn, head, d1, d2):
    """Return v_h r_delta of equation (8)."""
    e = attn.encoding
    if hasattr(e, 'row_table'):
        zero = len(e.row_table) // 2, len(e.col_table) // 2
        return e.row_keys[head] @ e.row_table[zero[0] + d1] + e.col_keys[head] @ e.col_table[zero[1] + d2]
    d = torch.tensor([d1, d2]) - e.centers[head]
    root = e.spreads[head] if e.full else e.spreads[head] * torch.eye(2).to(d)
    return -0.5 * d @ root @ root.T @ d


def softmax_over(attn, head, height, width):
    """Return the attention of a query to a centred window, one offset at a time."""
    offsets = list(itertools.product(range(-(height // 2), height // 2 + 1), range(-(width // 2), width // 2 + 1)))
    weights = [math.exp(score(attn, head, *delta).item()) for delta in offsets]
    return {delta: w / sum(weights) for delta, w in zip(offsets, weights)}


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(ENCODINGS), st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 7]), st.integers(0, 2 ** 16))
def test_a_head_s_kernel_is_its_softmax_over_the_kernel_s_offsets(encoding, height, width, seed):
    attn = make_layer(encoding, seed=seed)
    kernels = head_kernels(attn, (height, width))
    assert kernels.dtype == torch.float64 and kernels.shape == (3, height, width)
    for head in range(3):
        for (d1, d2), expected in softmax_over(attn, head, height, width).items():
            assert float(kernels[head, d1 + height // 2, d2 + width // 2]) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=3, max_size=3),
    st.integers(5, 9), st.integers(5, 9), st.integers(0, 2 ** 16))
def test_sharp_heads_are_a_convolution_at_the_border_too(centers, height, width, seed):
    """A sharp head selects one pixel (Lemma 2), or the nearest one beyond the border, as padding 'replicate' does."""
    attn = place_heads(make_layer(seed=seed), centers, [30.] * 3)
    conv, report = attention_to_conv(attn, grid_size=(height, width))
    x = noise(2, height, width, 4)
    torch.testing.assert_close(channels_last(conv, x), attn(x))
    assert conv.kernel_size == report.kernel_size == (1 + 2 * max(abs(c) for d in centers for c in d),) * 2
    assert report.mass == pytest.approx((1.,) * 3) and report.border_error in (None, pytest.approx(0., abs=1e-9))


def test_the_report_against_loops():
    attn = make_layer()
    x = noise(3, 9, 7, 4)
    conv, report = attention_to_conv(attn, (5, 3), inputs=x)
    for head in range(3):
        pattern = softmax_over(attn, head, 17, 13)  # all offsets between two pixels of 9 x 7
        inside = sum(p for (d1, d2), p in pattern.items() if abs(d1) <= 2 and abs(d2) <= 1)
        assert report.mass[head] == pytest.approx(inside)
    expected = attn(x).detach()
    got = channels_last(conv, x).detach()
    without_bias = expected - (attn.proj.weight @ attn.value.bias + attn.proj.bias).detach()
    squares = dict(interior=[0., 0.], border=[0., 0.])
    for b, i, j in itertools.product(range(3), range(9), range(7)):
        kind = squares['interior' if 2 <= i < 7 and 1 <= j < 6 else 'border']
        kind[0] += float((got - expected)[b, i, j].square().sum())
        kind[1] += float(without_bias[b, i, j].square().sum())
    assert report.interior_error == pytest.approx(math.sqrt(squares['interior'][0] / squares['interior'][1]))
    assert report.border_error == pytest.approx(math.sqrt(squares['border'][0] / squares['border'][1]))
    assert attention_to_conv(attn, (9, 3), inputs=x)[1].interior_error > 0
    assert attention_to_conv(attn, (11, 3), inputs=x)[1].interior_error is None
    assert attention_to_conv(attn, 1, inputs=x)[1].border_error is None


def test_learned_layers_are_read_at_the_central_query():
    attn = make_layer('learned', grid_size=(9, 7))
    conv, report = attention_to_conv(attn, (9, 7))
    x = noise(2, 9, 7, 4)
    torch.testing.assert_close(channels_last(conv, x)[:, 4, 3], attn(x)[:, 4, 3])
    assert report.mass == pytest.approx((1.,) * 3)
    assert attention_to_conv(make_layer('learned', grid_size=(8, 6)), (7, 5))[1].mass == pytest.approx((1.,) * 3)


def test_the_default_kernel_is_the_smallest_that_holds_every_head_and_fits_the_grid():
    for spread in (0.5, 3.):
        attn = place_heads(make_layer(), [[0., 0.], [1., -2.], [0., 1.5]], [spread, 3., 3.])
        _, report = attention_to_conv(attn, grid_size=(25, 25))
        side = report.kernel_size[0]
        assert report.kernel_size == (side, side) and min(report.mass) >= 0.999
        assert min(attention_to_conv(attn, side - 2, (25, 25))[1].mass) < 0.999
    attn = place_heads(make_layer(), [[0., 0.]] * 3, [0.] * 3)
    for grid_size, expected in (((8, 8), (7, 7)), ((1, 4), (1, 3))):
        assert attention_to_conv(attn, grid_size=grid_size)[1].kernel_size == expected


def test_a_convolution_is_computed_in_float64_and_has_the_layer_s_dtype():
    dtype = torch.bfloat16
    attn = make_layer(dtype=dtype, attn_drop=0.5, proj_drop=0.5).train()
    conv, report = attention_to_conv(attn, 3)
    double, expected = attention_to_conv(attn.double(), 3)
    assert conv.weight.dtype == conv.bias.dtype == dtype and report == expected
    torch.testing.assert_close(conv.weight, double.weight.to(dtype))
    assert attn.training and attn.attn_drop.p == 0.5


@pytest.mark.parametrize('attn,kwargs,match', [
    (make_layer(), dict(kernel_size=4), r'kernel_size=4: needs odd numbers up to \(17, 17\) on a grid of \(9, 9\)'),
    (make_layer(), dict(inputs=torch.zeros(2, 4, 9, 9)),
     r'inputs of shape \[2, 4, 9, 9\].*\(batch, height, width, 4\)'),
    (make_layer('learned', grid_size=(8, 8)), dict(kernel_size=9, grid_size=(8, 8)),
     r'kernel_size=9: needs odd numbers up to \(7, 7\) on a grid of \(8, 8\)'),
    (make_layer('sinusoid', terms=('content',)), {}, 'depends on content'),
    (torch.nn.Linear(4, 4), {}, 'attn=Linear: needs a SelfAttention2d'),
    (conv_to_attention(torch.nn.Conv2d(2, 2, 3)), dict(kernel_size=3, grid_size=None),
     r'kernel_size=3, grid_size=None.*: leave them out, a ConvAttention has its own'),
], ids=lambda v: v if isinstance(v, str) else None)
def test_other_layers_and_arguments_are_refused(attn, kwargs, match):
    with pytest.raises(ValueError, match=match):
        attention_to_conv(attn, **{'grid_size': (9, 9), **kwargs})


def test_the_border_follows_the_encoding():
    for encoding, expected in zip(ENCODINGS, ('replicate', 'replicate', 'reflect')):
        assert attention_to_conv(make_layer(encoding))[0].padding_mode == expected
    assert attention_to_conv(make_layer(), padding_mode='zeros')[0].padding_mode == 'zeros'


def test_softened_conv_attention():
    """Weights are sums over heads of each Gaussian, scaled to sum to 1 over the taps."""
    attn = conv_to_attention(torch.nn.Conv1d(2, 3, 3, dtype=torch.float64))
    with torch.no_grad():
        attn.spreads.copy_(torch.tensor([0.8, 1.2, 3.]))
        attn.centers[:, 0] += torch.tensor([0.2, 0., 1.5])
    x = noise(2, 2, 9)
    conv, report = attention_to_conv(attn, inputs=x)
    expected = torch.zeros(3, 2, 3, dtype=torch.float64)
    for head, (spread, center) in enumerate(((0.8, -0.8), (1.2, 0.), (3., 2.5))):
        def gaussian(offset, spread=spread, center=center):
            return math.exp(-spread ** 2 / 2 * (offset - center) ** 2)

        total = sum(gaussian(tap) for tap in (-1, 0, 1))
        for tap in (-1, 0, 1):
            expected[:, :, tap + 1] += gaussian(tap) / total * attn.value_weight[head].detach()
        assert report.mass[head] == pytest.approx(total / sum(gaussian(offset) for offset in range(-9, 10)))
    torch.testing.assert_close(conv.weight.detach(), expected)
    wide = conv_to_attention(torch.nn.Conv1d(2, 3, 7, padding=3), alpha=0.1)
    assert max(attention_to_conv(wide, inputs=noise(1, 2, 1))[1].mass) <= 1  # taps beyond the image are offsets too
    error = (conv(x) - attn(x)).norm() / (attn(x) - attn.bias[:, None]).norm()
    assert report.interior_error == pytest.approx(error.item()) and report.interior_error > 0.01


@pytest.mark.parametrize('encoding,attn_proj', [('quadratic_gen', False), ('learned', True)])
def test_timm_reparameterizes_a_net(encoding, attn_proj):
    net, x = random_net(encoding, attn_proj=attn_proj), noise(2, 3, 8, 8)
    marked = reparameterizable(net, kernel_size=3)
    torch.testing.assert_close(marked(x), net(x), rtol=0, atol=0)
    convs = reparameterize_model(marked)
    assert not any(isinstance(m, SelfAttention2d) for m in convs.modules())
    assert all(type(block.attn) is SelfAttention2d for block in net.blocks)
    fused = reparameterize_model(net)  # unmarked layers stay attention, their second Linear in their values
    assert all(type(block.attn) is SelfAttention2d for block in fused.blocks)
    torch.testing.assert_close(fused(x), net(x))

    expected = net.embed(x)
    for block in net.blocks:
        conv, report = attention_to_conv(block.attn, 3, grid_size=(4, 4))
        assert report.kernel_size == (3, 3)
        expected = block.norm1(expected + channels_last(conv, expected))
        expected = block.norm2(expected + block.mlp(expected))
    torch.testing.assert_close(convs.forward_features(x), expected)
    layer, y = convs.blocks[0].attn, noise(2, 4, 4, 8)
    torch.testing.assert_close(torch.jit.script(layer)(y), layer(y))
    convs.train()(x).sum().backward()
    assert all(p.grad is not None for p in convs.parameters())


def test_adapters_and_hooks_are_refused():
    net = random_net()
    net.blocks[0].attn.value.register_forward_hook(lambda module, args, out: 2 * out)
    net.blocks[1].attn.proj = Lora(net.blocks[1].attn.proj)
    for block, name in zip(net.blocks, ('value=Linear', 'proj=Lora')):
        with pytest.raises(ValueError, match=f'{name}: needs a plain module'):
            attention_to_conv(block.attn, 3)


def test_the_grid_follows_the_image_size():
    net = timm.create_model('sa_learned_tiny_cifar', img_size=48, embed_dim=8, mlp_dim=8)
    convs = reparameterize_model(reparameterizable(net))
    assert all(max(block.attn.conv.kernel_size) <= 11 for block in convs.blocks)
    with pytest.raises(ValueError, match=r'up to \(11, 11\) on a grid of \(12, 12\)'):
        reparameterize_model(reparameterizable(net, kernel_size=13))


def test_nets_without_position_only_layers_are_refused():
    with pytest.raises(ValueError, match='model: attention depends on content in all layers'):
        reparameterizable(random_net('learned', ('content', 'position')))
    with pytest.raises(ValueError, match='model=ResNetCifar: needs a SelfAttentionNet'):
        reparameterizable(timm.create_model('resnet18_cifar', device='meta'))
