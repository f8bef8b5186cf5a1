import copy

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import RELATIVE, SelfAttention2d
from timm_selfconv.theory import attention_to_conv, attention_to_convs, conv_to_attention, head_kernels
from tiny_nets import noise, random_net, randomised


def make_layer(encoding='quadratic', grid_size=(9, 9), seed=0, **kwargs):
    attn = SelfAttention2d(4, 3, encoding=encoding, grid_size=grid_size, dtype=torch.float64, **kwargs)
    return randomised(attn, seed)


def place_heads(attn, centers, spreads):
    attn.encoding.centers.data.copy_(torch.tensor(centers))
    attn.encoding.spreads.data.copy_(torch.tensor(spreads))
    return attn


def channels_last(conv, x):
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(RELATIVE), st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 7]), st.integers(0, 2 ** 16))
def test_a_head_s_kernel_is_the_attention_of_the_middle_query_of_a_grid_of_its_size(encoding, height, width, seed):
    attn = make_layer(encoding, seed=seed)
    maps = attn.attention_probs(noise(1, height, width, 4))[0, :, height // 2, width // 2]
    torch.testing.assert_close(head_kernels(attn, (height, width)), maps)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=3, max_size=3), st.integers(5, 9))
def test_sharp_heads_are_a_convolution_at_the_border_too(centers, width):
    """A sharp head picks one pixel (Lemma 2), and beyond the border the nearest one, as padding 'replicate' does."""
    attn, x = place_heads(make_layer(), centers, 30.), noise(2, 7, width, 4)
    conv, error = attention_to_conv(attn, grid_size=(7, width))
    torch.testing.assert_close(channels_last(conv, x), attn(x))
    assert conv.kernel_size == (1 + 2 * max(abs(c) for d in centers for c in d),) * 2 and error < 1e-9


def test_learned_layers_are_read_at_the_central_query():
    """The error is relative and without the bias."""
    attn = make_layer('learned', grid_size=(9, 7)).requires_grad_(False)
    conv, error = attention_to_conv(attn, (9, 7))
    x = torch.randn(2, 9, 7, 4, generator=torch.Generator().manual_seed(0)).double()
    expected, bias = attn(x), attn.proj(attn.value.bias)
    difference = channels_last(conv, x).detach() - expected
    assert difference[:, 4, 3].abs().max() < 1e-12
    assert error == pytest.approx(float(difference.norm() / (expected - bias).norm())) and error > 0.01


@pytest.mark.parametrize('spread', [0.5, 3.])
def test_the_default_kernel_is_the_smallest_that_holds_every_head(spread):
    attn = place_heads(make_layer(), [[0., 0.], [1., -2.], [0., 1.5]], [spread, 3., 3.])
    conv, _ = attention_to_conv(attn, grid_size=(25, 25))
    side, everywhere = conv.kernel_size[0], head_kernels(attn, (49, 49))
    inside, smaller = (everywhere[:, 24 - n:25 + n, 24 - n:25 + n].sum((1, 2)) for n in (side // 2, side // 2 - 1))
    assert conv.kernel_size == (side, side) and inside.min() >= 0.999 > smaller.min()
    flat = place_heads(attn, [[0., 0.]] * 3, 0.)  # no kernel holds its heads
    assert attention_to_conv(flat, grid_size=(1, 4))[0].kernel_size == (1, 3)


def test_a_convolution_is_computed_in_float64_and_has_the_layer_s_dtype():
    attn = make_layer(proj_drop=0.5).bfloat16().train()
    conv, error = attention_to_conv(attn, 3, padding_mode='zeros')
    double, expected = attention_to_conv(copy.deepcopy(attn).double(), 3, padding_mode='zeros')
    assert conv.weight.dtype == conv.bias.dtype == torch.bfloat16 and error == expected and attn.training
    assert conv.padding_mode == 'zeros'
    torch.testing.assert_close(conv.weight, double.weight.bfloat16())


@pytest.mark.parametrize('attn,kwargs,match', [
    (make_layer(), dict(kernel_size=4), r'kernel_size=4: needs odd numbers up to \(31, 31\) on a grid of \(16, 16\)'),
    *((make_layer(), dict(kernel_size=k), 'kernel_size=.*: needs a positive') for k in (0, 3., (3,), (3, 3, 3))),
    (make_layer('sinusoid', terms=('content',)), {}, 'attention depends on content'),
    (torch.nn.Linear(4, 4), {}, 'attn=Linear: needs a SelfAttention2d'),
    (conv_to_attention(torch.nn.Conv2d(2, 2, 3)), {}, 'ConvAttention has its own'),
], ids=lambda v: v if isinstance(v, str) else None)
def test_other_layers_and_arguments_are_refused(attn, kwargs, match):
    with pytest.raises(ValueError, match=match):
        attention_to_conv(attn, **{'kernel_size': 3, **kwargs})


def test_softened_conv_attention():
    """Weights are sums over heads of each Gaussian, scaled to sum to 1 over the taps."""
    attn = conv_to_attention(torch.nn.Conv1d(2, 3, 3, dtype=torch.float64)).requires_grad_(False)
    attn.spreads.copy_(torch.tensor([0.8, 1.2, 3.]))
    attn.centers[:, 0] += torch.tensor([0.2, 0., 1.5])
    conv, error = attention_to_conv(attn)
    gaussians = torch.exp(-attn.spreads[:, None] ** 2 / 2 * (torch.tensor([-1, 0, 1]) - attn.centers) ** 2)
    weights = gaussians / gaussians.sum(1, keepdim=True)  # (heads, taps)
    torch.testing.assert_close(conv.weight, torch.einsum('ht,hoc->oct', weights, attn.value_weight))
    assert error > 0.01


@pytest.mark.parametrize('encoding,attn_proj', [('quadratic_gen', False), ('learned', True)])
def test_all_layers_of_a_net(encoding, attn_proj):
    net, x = random_net(encoding, attn_proj=attn_proj), noise(2, 3, 8, 8)
    convs = attention_to_convs(net, kernel_size=3)
    assert all(type(block.attn) is SelfAttention2d for block in net.blocks)
    expected = net.embed(x)
    for block in net.blocks:
        conv, _ = attention_to_conv(block.attn, 3, grid_size=(4, 4))
        expected = block.norm1(expected + channels_last(conv, expected))
        expected = block.norm2(expected + block.mlp(expected))
    torch.testing.assert_close(convs.forward_features(x), expected)
    layer, y = convs.blocks[0].attn, noise(2, 4, 4, 8)
    torch.testing.assert_close(torch.jit.script(layer)(y), layer(y))
    convs.train()(x).sum().backward()
    assert all(p.grad is not None for p in convs.parameters())


def test_the_grid_follows_the_image_size():
    net = timm.create_model('sa_learned_tiny_cifar', img_size=48, embed_dim=8, mlp_dim=8)
    assert all(max(block.attn.conv.kernel_size) <= 11 for block in attention_to_convs(net).blocks)
    with pytest.raises(ValueError, match=r'up to \(11, 11\) on a grid of \(12, 12\)'):
        attention_to_convs(net, kernel_size=13)
    with pytest.raises(ValueError, match='model: attention depends on content in all layers'):
        attention_to_convs(random_net('learned', ('content', 'position')))
