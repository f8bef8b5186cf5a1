import copy
import itertools
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from torch.nn.utils import prune

from held import LargestTensor
from timm_selfconv.layers import SelfAttention2d, conv_attention
from timm_selfconv.layers.functional import gather_by_maps
from timm_selfconv.theory import attention_to_conv, conv_to_attention
from tiny_nets import noise

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODES = ['zeros', 'reflect', 'replicate', 'circular']


def make_conv(dims=2, in_channels=3, out_channels=4, kernel_size=3, dtype=torch.float64, seed=0, **kwargs):
    torch.manual_seed(seed)
    return CONVS[dims](in_channels, out_channels, kernel_size, dtype=dtype, **kwargs)


def assert_equal_up_to(tolerance, got, expected):
    """Check that shape and dtype agree, and values up to a share of the largest expected value."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if expected.numel():
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * expected.abs().max().item())


@st.composite
def convolutions(draw, dtype=torch.float64):
    """Draw a convolution of any kind, and the shape of an input."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def per_axis(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims)))

    kernel_size, dilation = per_axis(1, 4 if dims < 3 else 3), per_axis(1, 3 if dims < 3 else 2)
    padding = draw(st.sampled_from(['same', 'valid', 'int', 'tuple']))
    stride = per_axis(1, 1 if padding == 'same' else 3)
    padding = {'int': draw(st.integers(0, 2)), 'tuple': per_axis(0, 3)}.get(padding, padding)
    conv = make_conv(
        dims, groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 3)), kernel_size, stride=stride,
        dilation=dilation, padding=padding, padding_mode=draw(st.sampled_from(MODES)), groups=groups,
        bias=draw(st.booleans()), dtype=dtype, seed=draw(st.integers(0, 2 ** 16)))
    # reflection needs more pixels than it adds, and the kernel its reach
    smallest = [max(4, d * (k - 1) + 1) for k, d in zip(kernel_size, dilation)]
    size = [low + draw(st.integers(0, 3)) for low in smallest]
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    return conv, (*batch, conv.in_channels, *size)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=40)
@given(convolutions(), st.sampled_from([(torch.float64, 1e-14), (torch.float32, 1e-5)]))
def test_attention_is_the_convolution_and_becomes_it_again(case, precision):
    (conv, shape), (dtype, tolerance) = case, precision
    conv, x = conv.to(dtype), noise(*shape, dtype=dtype)
    attention = conv_to_attention(conv)
    assert_equal_up_to(tolerance, attention(x), conv(x))
    back, report = attention_to_conv(attention)
    assert type(back) is type(conv) and repr(back) == repr(conv)
    torch.testing.assert_close(back.state_dict(), conv.state_dict(), rtol=0, atol=1e-5)
    assert report.kernel_size == conv.kernel_size and report.border_error is None
    assert report.interior_error < 1e-6 and min(report.mass) > 1 - 1e-6


@pytest.mark.parametrize('dtype,in_channels,out_channels', [(torch.float16, 3, 16), (torch.bfloat16, 32, 8)])
def test_half_precision_is_exact_to_its_rounding(dtype, in_channels, out_channels):
    """Rounding errors do not grow with the number of heads."""
    conv = make_conv(2, in_channels, out_channels, 7, dtype, padding=3, stride=2)
    x = noise(2, in_channels, 20, 18, dtype=dtype)
    attention = conv_to_attention(conv)
    expected = copy.deepcopy(conv).double()(x.double())
    assert attention.centers.dtype == attention(x).dtype == dtype
    assert_equal_up_to(2 * torch.finfo(dtype).eps, attention(x).double(), expected)
    assert torch.equal(conv_to_attention(conv.float()).to(dtype)(x), attention(x))


def dense_maps(attention, size):
    """Return the softmax of v r_delta over all pixels, equations (8) and (9), one query and head at a time."""
    origins = [d * (k - 1) // 2 for k, d in zip(attention.kernel_size, attention.dilation)]
    counts = [(n - d * (k - 1) - 1) // s + 1
              for n, k, d, s in zip(size, attention.kernel_size, attention.dilation, attention.stride)]
    keys = torch.tensor(list(itertools.product(*map(range, size))), dtype=torch.float64)
    maps = torch.zeros(attention.num_heads, *counts, *size, dtype=torch.float64)
    for head, output in itertools.product(range(attention.num_heads), itertools.product(*map(range, counts))):
        alpha = attention.spreads[head].double() ** 2 / 2
        v = -alpha * torch.cat([torch.ones(1), -2 * attention.centers[head]])
        query = torch.tensor([o + s * i for o, s, i in zip(origins, attention.stride, output)])
        scores = [v @ torch.cat([delta @ delta[:, None], delta]) for delta in keys - query]
        maps[(head, *output)] = torch.stack(scores).softmax(0).view(*size)
    return maps


@pytest.mark.parametrize('dims,kernel_size,stride,dilation,size', [
    (1, (4,), (2,), (2,), (9,)), (2, (3, 2), (1, 2), (1, 2), (5, 6)), (3, (1, 2, 2), (1, 1, 2), (2, 2, 1), (1, 3, 3))])
def test_soft_heads_are_equations_8_and_9(dims, kernel_size, stride, dilation, size):
    """The factors equal the paper's attention for any centre and width, also at borders."""
    conv = make_conv(dims, 4, 6, kernel_size, stride=stride, dilation=dilation, padding=1, groups=2)
    attention = conv_to_attention(conv)
    with torch.no_grad():
        attention.centers.add_(noise(*attention.centers.shape))
        attention.spreads.copy_(0.3 + noise(attention.num_heads).abs())
        maps = dense_maps(attention, [n + 2 for n in size])
        torch.testing.assert_close(attention.attention_probs(size), maps)

        x = noise(2, 4, *size)
        values = torch.einsum(
            'hgdc,bgcn->hbgdn', attention.value_weight.view(-1, 2, 3, 2),
            F.pad(x, [1] * 2 * dims).reshape(2, 2, 2, -1)).flatten(2, 3)
        expected = torch.einsum('hqn,hbdn->bdq', maps.flatten(-dims).flatten(1, dims), values)
        torch.testing.assert_close(
            attention(x), expected.view(2, 6, *maps.shape[1:1 + dims]) + conv.bias.view(-1, *[1] * dims))


def test_maps_of_few_keys_equal_factors(monkeypatch):
    """Outputs and gradients, with twice as many output channels as keys."""
    size = 5, 3
    conv = make_conv(2, 4, 30, 3, stride=(2, 1), padding=1)
    attention, x = conv_to_attention(conv, 0.5), noise(2, 4, *size).requires_grad_()
    with torch.no_grad():
        attention.centers.add_(noise(9, 2))
        maps = dense_maps(attention, [n + 2 for n in size])[..., 1:-1, 1:-1]
    by_maps = []
    monkeypatch.setattr(
        conv_attention, 'gather_by_maps',
        lambda *args, **kwargs: by_maps.append(args) or gather_by_maps(*args, **kwargs))
    expected = torch.einsum('hijkl,hoc,bckl->boij', maps, attention.value_weight, x) + conv.bias[:, None, None]
    out = attention(x)
    assert len(by_maps) == 1
    torch.testing.assert_close(out, expected)
    monkeypatch.setattr(conv_attention, 'FEW_KEYS', 1e9)
    torch.testing.assert_close(*[
        torch.autograd.grad(y.square().sum(), [x, *attention.parameters()]) for y in (out, attention(x))])


def test_content_begins_at_nothing_and_is_equation_8():
    torch.manual_seed(0)
    conv = make_conv(2, 3, 4, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2))
    x, alone, attention = noise(2, 3, 6, 7), conv_to_attention(conv, 2.), conv_to_attention(conv, 2., content=5)
    torch.testing.assert_close(attention(x), alone(x))
    nn.init.normal_(attention.query.weight)
    padded = F.pad(x, [1] * 4)
    scores = dense_maps(attention, padded.shape[2:]).log().flatten(3)  # of position
    heads, rows, cols, _ = scores.shape
    query = attention.query(padded.permute(0, 2, 3, 1))[:, 1::2, 1:][:, :rows, :cols].unflatten(3, (heads, 5))
    key = attention.key(padded.flatten(2).transpose(1, 2)).unflatten(2, (heads, 5))
    content = torch.einsum('bijhd,bkhd->bhijk', query, key) / 5 ** 0.5
    gathered = torch.einsum('bhijk,bck->bhcij', (scores + content).softmax(-1), padded.flatten(2))
    expected = torch.einsum('hoc,bhcij->boij', attention.value_weight, gathered) + conv.bias[:, None, None]
    torch.testing.assert_close(attention(x), expected)
    assert not torch.allclose(expected, alone(x), atol=0.1)
    attention(x).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in attention.parameters())


def test_gradients_of_all_parameters():
    attention = conv_to_attention(make_conv(2, 2, 4, (2, 3), stride=(1, 2), padding=1, groups=2), 0.7)
    names = [name for name, _ in attention.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(attention, dict(zip(names, parameters)), (x,))

    assert names == ['centers', 'spreads', 'value_weight', 'bias']
    assert torch.autograd.gradcheck(
        function, (noise(1, 2, 3, 4).requires_grad_(), *attention.parameters()))


def test_the_layer_of_the_zoo_is_a_convolution_too():
    """Theorem 1 for SelfAttention2d, and its remark on padding.

    The layer is a convolution away from the border, and a padded convolution if zeros surround the image.
    """
    conv = make_conv(2, 4, 4, 3, padding=1)
    attention = conv_to_attention(conv)
    layer = SelfAttention2d(4, 9, proj=False, dtype=torch.float64).eval()
    with torch.no_grad():
        layer.encoding.centers.copy_(attention.centers)
        layer.encoding.spreads.copy_(attention.spreads)
        layer.value.weight.copy_(attention.value_weight.permute(1, 0, 2).reshape(4, 36))
        layer.value.bias.copy_(attention.bias)
        x = noise(2, 4, 8, 6)

        def layer_of(images):
            return layer(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

        inside = slice(1, -1)
        torch.testing.assert_close(layer_of(x)[:, :, inside, inside], conv(x)[:, :, inside, inside])
        assert not torch.allclose(layer_of(x), conv(x), atol=0.1)
        torch.testing.assert_close(layer_of(F.pad(x, [1] * 4))[:, :, inside, inside], conv(x))


def test_no_more_than_a_few_outputs_are_held_at_a_time():
    in_channels, out_channels, groups, side = 2, 16, 1, 96
    conv = make_conv(2, in_channels, out_channels, 7, torch.float32, padding=3, groups=groups)
    x = noise(1, in_channels, side, side, dtype=torch.float32)
    with LargestTensor() as largest, torch.no_grad():
        conv_to_attention(conv)(x)
    assert largest.numel <= max(4 * max(in_channels, out_channels) * (side + 6) ** 2, 2 ** 21) < side ** 4 / 10


def test_meta_convolutions_become_meta_attention():
    attention = conv_to_attention(nn.Conv2d(3, 4, 3, device='meta', dtype=torch.bfloat16))
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in attention.parameters())
    assert attention(torch.empty(2, 3, 5, 6, device='meta', dtype=torch.bfloat16)).shape == (2, 4, 3, 4)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=20)
@given(convolutions(dtype=torch.float32), st.sampled_from([torch.bfloat16, torch.float16]))
@example((make_conv(2, 6, 6, 1, torch.float32, stride=(3, 1), groups=6), (2, 6, 5, 5)), torch.bfloat16)  # depthwise
def test_autocast(case, dtype):
    conv, shape = case
    attention, x = conv_to_attention(conv), noise(*shape, dtype=torch.float32)
    with torch.autocast('cpu', dtype), torch.no_grad():
        got, expected = attention(x), conv(x)
        assert all(factor.dtype == torch.float32 for factor in attention.axis_factors([20] * len(conv.kernel_size)))
    assert got.shape == expected.shape and got.dtype == expected.dtype == dtype
    if x.numel():
        largest = conv.weight.abs().flatten(1).sum(1).max() * x.abs().max() + 1  # bound of an output, with bias
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * torch.finfo(dtype).eps * largest.item())


@pytest.mark.slow
def test_it_compiles_in_one_graph():
    attention = conv_to_attention(make_conv(2, 3, 8, 3, torch.float32, stride=2, padding=1))
    compiled = torch.compile(attention, backend='aot_eager', fullgraph=True, dynamic=True)
    x = noise(2, 3, 16, 12, dtype=torch.float32)
    torch.testing.assert_close(compiled(x), attention(x))
    torch.testing.assert_close(*[
        torch.autograd.grad(f(x).square().sum(), [*attention.parameters()]) for f in (compiled, attention)])


class NegatedConv(nn.Conv2d):
    def forward(self, x):
        return -super().forward(x)


def hooked(conv):
    conv.register_forward_hook(lambda module, args, out: -out)
    return conv


@pytest.mark.parametrize('conv,match', [
    (nn.LazyConv2d(4, 3), 'conv=LazyConv2d: is lazy'),
    (NegatedConv(3, 4, 3), 'conv=NegatedConv: has a custom forward, needs the forward of nn.Conv2d'),
    (nn.utils.parametrizations.weight_norm(make_conv()), 'conv=ParametrizedConv2d: is parametrized'),
    (prune.l1_unstructured(make_conv(), 'weight', 0.5), 'conv=Conv2d: is parametrized, pruned or hooked'),
    (hooked(make_conv()), 'hooked'),
    (make_conv(dtype=torch.complex64), 'conv=Conv2d: has torch.complex64 weights'),
    (make_conv(dtype=torch.bfloat16, dilation=257), r'dilation=\(257, 257\): torch.bfloat16 cannot represent'),
], ids=lambda v: v if isinstance(v, str) else None)
def test_modules_that_are_no_plain_convolution_are_refused(conv, match):
    with pytest.raises(ValueError, match=match):
        conv_to_attention(conv)


def test_bad_arguments_are_named():
    for alpha in (0, math.nan, True, '46'):
        with pytest.raises(ValueError, match=f'alpha={alpha!r}: needs a positive number'):
            conv_to_attention(make_conv(), alpha)
    for conv in (nn.Conv2d(4, 4, 3, groups=2), nn.Conv1d(3, 4, 3)):
        with pytest.raises(ValueError, match='content=8: needs 0, or a number of channels if the convolution'):
            conv_to_attention(conv, content=8)


@pytest.mark.parametrize('dtype,largest', [
    (torch.float16, 1e9), (torch.bfloat16, 8e37), (torch.float64, 4e307)])
def test_huge_alpha_is_right_or_refused(dtype, largest):
    conv, x = make_conv(dtype=dtype, padding=1), noise(2, 3, 5, 6, dtype=dtype)
    attention = conv_to_attention(conv, largest)
    out = attention(x)
    assert_equal_up_to(4 * torch.finfo(dtype).eps, out, conv(x))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    for alpha in (2 * largest if dtype == torch.float64 else 4 * largest, 1e308, 10 ** 400):
        with pytest.raises(ValueError, match=rf'needs a positive number, in {dtype} up to'):
            conv_to_attention(conv, alpha)


def test_inputs_that_do_not_fit_are_named():
    attention = conv_to_attention(make_conv(dilation=2))
    with pytest.raises(ValueError, match=r'x of shape \[2, 4, 5, 5\]: needs 3 channels, then 2 axes'):
        attention(noise(2, 4, 5, 5))
    with pytest.raises(ValueError, match=r'x of size \[5, 4\] .*: needs room for a kernel of \[3, 3\] with dilation'):
        attention(noise(1, 3, 5, 4))
