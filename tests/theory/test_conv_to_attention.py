import itertools
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from timm.layers import StdConv2d
from torch.nn.utils import prune

from held import Memory
from timm_selfconv.layers import SelfAttention2d, conv_attention
from timm_selfconv.theory import attention_to_conv, conv_to_attention
from tiny_nets import noise


def make_conv(dims=2, in_channels=3, out_channels=4, kernel_size=3, dtype=torch.float64, seed=0, **kwargs):
    torch.manual_seed(seed)
    return conv_attention.CONVS[dims - 1](in_channels, out_channels, kernel_size, dtype=dtype, **kwargs)


def largest(x):
    return x.detach().abs().max().item() if x.numel() else 0.


@st.composite
def convolutions(draw):
    """A convolution of any kind, and the shape of an input that it takes."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def per_axis(low, high):
        return st.tuples(*dims * [st.integers(low, high)])

    kernel_size, dilation = draw(per_axis(1, 4 if dims < 3 else 3)), draw(per_axis(1, 3 if dims < 3 else 2))
    padding = draw(st.sampled_from(['same', 'valid']) | st.integers(0, 2) | per_axis(0, 3))
    stride = draw(per_axis(1, 1 if padding == 'same' else 3))
    conv = make_conv(
        dims, groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 3)), kernel_size, stride=stride,
        dilation=dilation, padding=padding, groups=groups, bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(['zeros', 'reflect', 'replicate', 'circular'])),
        seed=draw(st.integers(0, 2 ** 16)))
    # reflection needs more pixels than it adds, and the kernel its reach
    size = [max(4, d * (k - 1) + 1) + draw(st.integers(0, 3)) for k, d in zip(kernel_size, dilation)]
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    return conv, (*batch, conv.in_channels, *size)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=40)
@given(convolutions(), st.sampled_from([(torch.float64, 1e-14), (torch.float32, 1e-5)]))
def test_attention_is_the_convolution_and_becomes_it_again(case, precision):
    (conv, shape), (dtype, tolerance) = case, precision
    conv, x = conv.to(dtype), noise(*shape, dtype=dtype)
    attention, expected = conv_to_attention(conv), conv(x)
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=tolerance * largest(expected))
    back, error = attention_to_conv(attention)
    assert type(back) is type(conv) and repr(back) == repr(conv)
    torch.testing.assert_close(back.state_dict(), conv.state_dict(), rtol=0, atol=1e-5)
    assert error < 1e-6


def dense_maps(attention, size):
    """Return the softmax of v r_delta over all pixels, equations (8) and (9)."""
    spans = [d * (k - 1) for k, d in zip(attention.kernel_size, attention.dilation)]
    outputs = [range(span // 2, span // 2 + n - span, s) for n, span, s in zip(size, spans, attention.stride)]
    keys, queries = (torch.tensor(list(itertools.product(*axes))).double() for axes in (map(range, size), outputs))
    delta, alpha = keys - queries[:, None], attention.spreads[:, None] ** 2 / 2
    r_delta = torch.cat([delta.square().sum(-1, keepdim=True), delta], -1)
    v = -alpha * torch.cat([torch.ones_like(alpha), -2 * attention.centers], 1)
    maps = torch.einsum('hr,qkr->hqk', v, r_delta).softmax(-1)
    return maps.view(attention.num_heads, *map(len, outputs), *size)


@pytest.mark.parametrize('kernel_size,stride,dilation,size,groups,few_keys', [
    ((4,), (2,), (2,), (9,), 2, 0), ((3, 2), (1, 2), (1, 2), (4, 5), 2, 0),
    ((1, 2, 2), (1, 1, 2), (2, 2, 1), (1, 3, 2), 1, 0), ((2, 3), (1, 2), (1, 1), (3, 4), 1, 0),
    ((2, 3), (2, 1), (1, 1), (3, 2), 1, 1e9)])
def test_soft_heads_are_equations_8_and_9(kernel_size, stride, dilation, size, groups, few_keys, monkeypatch):
    """For any centre and width, also at borders, by every formula. Gradients against finite differences."""
    monkeypatch.setattr(conv_attention, 'FEW_KEYS', few_keys)
    dims, x = len(size), noise(1, 2, *size)
    conv = make_conv(dims, 2, 4, kernel_size, stride=stride, dilation=dilation, padding=1, groups=groups)
    attention = conv_to_attention(conv)
    with torch.no_grad():
        attention.centers.add_(noise(*attention.centers.shape))
        attention.spreads.copy_(0.3 + noise(attention.num_heads).abs())
        maps = dense_maps(attention, [n + 2 for n in size])
        torch.testing.assert_close(attention.attention_probs(size), maps)

        padded = F.pad(x, [1] * 2 * dims).flatten(2)
        values = torch.stack([F.conv1d(padded, w[..., None], groups=groups) for w in attention.value_weight])
        gathered = torch.einsum('hqn,hbdn->bdq', maps.flatten(-dims).flatten(1, dims), values)
        expected = gathered.view(1, 4, *maps.shape[1:1 + dims]) + conv.bias.view(-1, *[1] * dims)
        torch.testing.assert_close(attention(x), expected)

    names, parameters = zip(*attention.named_parameters())
    assert names == ('centers', 'spreads', 'value_weight', 'bias')
    assert torch.autograd.gradcheck(lambda x, *parameters: attention(x), (x.requires_grad_(), *parameters))


def test_the_layer_of_the_zoo_is_a_convolution_too():
    """Theorem 1 for SelfAttention2d, away from the border, and everywhere if zeros surround the image (its remark)."""
    conv = make_conv(2, 4, 4, 3, padding=1)
    attention = conv_to_attention(conv)
    layer = SelfAttention2d(4, 9, proj=False, dtype=torch.float64).eval()
    layer.encoding.load_state_dict(dict(centers=attention.centers, spreads=attention.spreads))
    layer.value.load_state_dict(dict(
        weight=attention.value_weight.permute(1, 0, 2).reshape(4, 36), bias=attention.bias))
    x, inside = noise(2, 4, 8, 6), (..., slice(1, -1), slice(1, -1))
    plain, surrounded = (layer(t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for t in (x, F.pad(x, [1] * 4)))
    torch.testing.assert_close(plain[inside], conv(x)[inside])
    assert not torch.allclose(plain, conv(x), atol=0.1)
    torch.testing.assert_close(surrounded[inside], conv(x))


def test_no_more_than_a_few_outputs_are_held_at_a_time():
    conv, side = make_conv(2, 2, 16, 7, torch.float32, padding=3), 96
    with Memory() as memory, torch.no_grad():
        conv_to_attention(conv)(noise(1, 2, side, side, dtype=torch.float32))
    assert memory.largest <= 2 ** 21 < side ** 4 / 10


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=20)
@given(convolutions(), st.sampled_from([torch.bfloat16, torch.float16]))
@example((make_conv(2, 6, 6, 1, stride=(3, 1), groups=6), (2, 6, 5, 5)), torch.bfloat16)  # depthwise
@example((make_conv(2, 32, 8, 7, padding=3, stride=2), (2, 32, 20, 18)), torch.bfloat16)
def test_autocast(case, dtype):
    """Rounding errors do not grow with the number of heads."""
    conv, x = case[0].float(), noise(*case[1], dtype=torch.float32)
    expected = conv(x).detach()  # in bfloat16 torch's Conv3d of stride 3 reads memory that is not set
    with torch.autocast('cpu', dtype), torch.no_grad():
        got = conv_to_attention(conv)(x)
    assert got.dtype == dtype
    bound = 1 + largest(conv.weight.flatten(1).abs().sum(1)) * largest(x)  # of an output, with bias
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps * bound)


@pytest.mark.parametrize('conv,alpha,match', [
    (StdConv2d(3, 4, 3), 46., 'conv=StdConv2d: has a custom forward, needs the forward of nn.Conv2d'),
    (nn.utils.parametrizations.weight_norm(make_conv()), 46., 'conv=ParametrizedConv2d: is parametrized'),
    (prune.l1_unstructured(make_conv(), 'weight', 0.5), 46., 'conv=Conv2d: is parametrized, pruned or hooked'),
    (make_conv(dtype=torch.bfloat16, dilation=257), 46., r'dilation=\(257, 257\): torch.bfloat16 cannot represent'),
    *((make_conv(), alpha, f'alpha={alpha}: needs a number above 0') for alpha in (0, math.nan, True, 2000000000)),
], ids=lambda v: v if isinstance(v, str) else None)
def test_modules_and_numbers_that_cannot_be_converted_are_refused(conv, alpha, match):
    with pytest.raises(ValueError, match=match):
        conv_to_attention(conv, alpha)


@settings(deadline=None, max_examples=20)
@given(st.floats(-2, 9), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_other_pixels_get_no_more_than_on_an_unbounded_grid(exponent, dtype):
    """Lemma 2 at any alpha. Outputs and gradients are always numbers."""
    alpha, eps = 10. ** exponent, torch.finfo(dtype).eps
    conv, x = make_conv(dtype=dtype, padding=1), noise(2, 3, 5, 6, dtype=dtype)
    attention = conv_to_attention(conv, alpha)
    out = attention(x)
    leak = 1 - sum(math.exp(-alpha * n * n) for n in range(-12, 13)) ** -2
    size = float(conv.weight.abs().sum(dim=(1, 2, 3)).max() * 2 * x.abs().max())
    assert (out - conv(x)).abs().max() <= (leak + 40 * eps) * size
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


def test_inputs_that_do_not_fit_are_named():
    attention = conv_to_attention(make_conv(dilation=2))
    with pytest.raises(ValueError, match=r'x of shape \[2, 4, 5, 5\]: needs 3 channels, then 2 axes'):
        attention(noise(2, 4, 5, 5))
    with pytest.raises(ValueError, match=r'x of size \[5, 4\] .*: needs room for a kernel of \[3, 3\] with dilation'):
        attention(noise(1, 3, 5, 4))
