import itertools

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from timm_selfconv.layers.san_attention import PassBatchNorm2d, SanAttention2d
from tiny_nets import noise


def attention(kind='pairwise', **kwargs):
    """Make a layer in eval mode with parameters and statistics that are neither near zero nor symmetric."""
    attn = SanAttention2d(32, kind, dtype=torch.float64, **kwargs).eval()
    generator = torch.Generator().manual_seed(0)
    for p in attn.parameters():
        p.data.normal_(std=0.7, generator=generator)
    for name in ('running_mean', 'running_var'):
        for norm in [m for m in attn.modules() if isinstance(m, torch.nn.BatchNorm2d)]:
            getattr(norm, name).copy_(torch.rand(norm.num_features, generator=generator, dtype=torch.float64) + 0.5)
    return attn


def reflected(i, size):
    """Return the index of pixel i after reflection at the first and last pixel of an axis."""
    i = abs(i)
    return i if i < size else 2 * (size - 1) - i


def linear(conv, v):
    out = conv.weight[:, :, 0, 0] @ v
    return out if conv.bias is None else out + conv.bias


def normed(norm, v, i=0):
    """Apply BatchNorm with the statistics of pass i, then ReLU, to one vector."""
    v = (v - norm.passes[i].running_mean) / (norm.passes[i].running_var + 1e-5).sqrt() * norm.weight + norm.bias
    return v.clamp(min=0)


def reference(attn, x, i=0, other=None):
    """Compute the definition for one image, query, offset and channel at a time, with keys of x or of other images."""
    k, stride, dilation = attn.kernel_size, attn.stride, attn.dilation
    r, m, maps = 2, 8, 1
    height, width = x.shape[2:]
    rows, cols = range(0, height, stride), range(0, width, stride)
    out = torch.zeros(len(x), m, len(rows), len(cols), dtype=x.dtype)

    def place(row, col):
        return linear(attn.position, torch.tensor(
            [-1 + 2 * row / (height - 1), -1 + 2 * col / (width - 1)], dtype=x.dtype))

    for b, (a, row), (c, col) in itertools.product(range(len(x)), enumerate(rows), enumerate(cols)):
        query = linear(attn.qvk, x[b, :, row, col])[:r]
        pixels = [
            (reflected(row + dilation * (s - k // 2), height), reflected(col + dilation * (t - k // 2), width))
            for s in range(k) for t in range(k)]
        values = [linear(attn.qvk, x[b, :, p, q])[r:r + m] for p, q in pixels]
        keys = [linear(attn.qvk, (x if other is None else other)[b, :, p, q])[r + m:] for p, q in pixels]
        if attn.patchwise:
            hidden = linear(attn.weight1, normed(attn.norm1, torch.cat([query, *keys]), i))
            weights = linear(attn.weight2, normed(attn.norm2, hidden, i)).view(k * k, maps)
        else:
            scores = []
            for key, pixel in zip(keys, pixels):
                pair = torch.cat([query - key, place(row, col) - place(*pixel)])
                hidden = linear(attn.weight1, normed(attn.norm1, pair, i))
                scores.append(linear(attn.weight2, normed(attn.norm2, hidden, i)))
            weights = torch.stack(scores).softmax(0)
        for j in range(m):
            out[b, j, a, c] = sum(w[j % maps] * v[j] for w, v in zip(weights, values))
    return out


@pytest.mark.parametrize('kind,kwargs', [
    ('pairwise', dict(kernel_size=5, stride=3)), ('patchwise', dict(dilation=2)), ('patchwise', dict(kernel_size=1)),
    ('pairwise', dict(qkv_bias=False, stride=2, dilation=2))])
def test_attention_is_the_definition(kind, kwargs):
    attn = attention(kind, **kwargs)
    x = noise(2, 32, 5, 6)
    out = attn(x)
    torch.testing.assert_close(out, reference(attn, x))
    with torch.no_grad():
        torch.testing.assert_close(attn(x), out)
    assert attn.keys(x).shape == (2, 2, 5, 6)


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
def test_passes_have_separate_statistics_and_use_given_keys(kind):
    attn = attention(kind, passes=3)
    x, other = noise(1, 32, 4, 5), noise(2, 32, 4, 5)[1:]
    for i, grad in itertools.product(range(3), (True, False)):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(attn(x, None, i), reference(attn, x, i))
    torch.testing.assert_close(attn(x, attn.keys(other), 1), reference(attn, x, 1, other))


@pytest.mark.parametrize('key', [None, noise(2, 2, 4, 5)])
def test_a_parametrized_map_is_honoured(key):
    """With given keys and without gradients too. models/test_wrapping.py tests replaced modules."""
    x, attn, plain = noise(2, 32, 4, 5), attention(), attention()
    conv = weight_norm(attn.qvk)
    original = conv.parametrizations.weight.original0
    original.data.mul_(1.5)
    plain.qvk.weight.data = conv.weight.detach()
    with torch.no_grad():
        torch.testing.assert_close(attn(x, key), plain(x, key))
        torch.testing.assert_close(attn.keys(x), plain.keys(x))
    for layer in (attn, plain):
        layer(x, key).square().sum().backward()
    wanted, = torch.autograd.grad(conv.weight, original, plain.qvk.weight.grad)
    torch.testing.assert_close(original.grad, wanted)


@pytest.mark.parametrize('key', [None, noise(2, 2, 4, 5)])
def test_a_hook_sees_and_changes_queries_values_and_keys(key):
    attn, x, seen = attention(), noise(2, 32, 4, 5), []
    wanted = attn(x, key)
    attn.qvk.register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(attn(x, key), wanted)
    assert torch.equal(attn.keys(x), seen[0][:, -attn.query_dim:])
    assert [out.shape for out in seen] == [(2, attn.qvk.out_channels, 4, 5)] * 2
    attn.qvk.register_forward_hook(lambda module, args, out: 0 * out)
    with torch.no_grad():
        assert attn(x, key).abs().max() == 0


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
def test_without_gradients_no_images_and_autocast(kind):
    attn, x = attention(kind).float(), noise(20, 32, 5, 4).float()
    with torch.no_grad():
        assert attn(x[:0]).shape == (0, 8, 5, 4)
        wanted = attn(x)
        with torch.autocast('cpu', torch.bfloat16):
            out = attn(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))


def test_batch_norm_keeps_statistics_a_pass():
    ours, theirs = PassBatchNorm2d(4, 2), [torch.nn.BatchNorm2d(4) for _ in range(2)]
    for i, step in itertools.product(range(2), range(3)):
        x = torch.randn(5, 4, 3, 3) * (i + 1) + step
        torch.testing.assert_close(ours(x, i), theirs[i](x))
    for i in range(2):
        for name, statistics in theirs[i].named_buffers():  # with the number of batches
            torch.testing.assert_close(getattr(ours.passes[i], name), statistics)
        torch.testing.assert_close(ours.eval()(x, i), theirs[i].eval()(x))
    assert sum(p.numel() for p in ours.parameters()) == 8
    with pytest.raises(ValueError, match='pass_index=2: needs one of 2 passes'):
        ours(torch.zeros(5, 4, 3, 3), 2)


def test_statistics_of_all_passes_in_one_buffer_load():
    """The shipped files have this format of version 0.1."""
    norm, mean, var = PassBatchNorm2d(4, 2), torch.randn(2, 4), torch.rand(2, 4)
    norm.load_state_dict(dict(weight=norm.weight, bias=norm.bias, running_mean=mean, running_var=var))
    for i in range(2):
        assert torch.equal(norm.passes[i].running_mean, mean[i]) and torch.equal(norm.passes[i].running_var, var[i])
    norm.load_state_dict({name: value.clone() for name, value in norm.state_dict().items()})
    with pytest.raises(RuntimeError, match=r'passes\.2\.running_mean'):
        norm.load_state_dict(dict(weight=norm.weight, bias=norm.bias, running_mean=mean[[0, 0, 1]], running_var=var))


def test_bad_arguments_are_named():
    for kwargs, match in (
            (dict(kind='global'), "kind='global': needs one of"), (dict(dim=48), 'dim=48: needs a multiple of 32'),
            (dict(kernel_size=4), 'kernel_size=4: needs an odd number'), (dict(stride=0), 'stride=0')):
        with pytest.raises(ValueError, match=match):
            SanAttention2d(**dict(dict(dim=32), **kwargs))


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
def test_images_too_small_to_reflect_are_refused(kind):
    with pytest.raises(ValueError, match=r'\[1, 2, 3, 2\]: needs a height and width of at least 3'):
        attention(kind, dilation=2)(noise(1, 32, 3, 2))
