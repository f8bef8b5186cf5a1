import itertools

import pytest
import torch

from timm_selfconv.layers.san_attention import PassBatchNorm2d, SanAttention2d
from tiny_nets import noise


def attention(kind='pairwise', **kwargs):
    """Make a layer in eval mode with parameters and statistics that are neither near zero nor symmetric."""
    attn = SanAttention2d(32, kind, dtype=torch.float64, **kwargs).eval()
    generator = torch.Generator().manual_seed(0)
    for p in attn.parameters():
        p.data.normal_(std=0.7, generator=generator)
    for name, statistics in attn.named_buffers():
        if not name.endswith('num_batches_tracked'):
            statistics.uniform_(0.5, 1.5, generator=generator)
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
    """The definition, one image, query, offset and channel at a time; keys may be those of other images."""
    k, r, m = attn.kernel_size, 2, 8
    height, width = x.shape[2:]
    out = torch.zeros(len(x), m, height, width, dtype=x.dtype)

    def place(row, col):
        return linear(attn.position, torch.tensor(
            [-1 + 2 * row / (height - 1), -1 + 2 * col / (width - 1)], dtype=x.dtype))

    for b, row, col in itertools.product(range(len(x)), range(height), range(width)):
        query = linear(attn.qvk, x[b, :, row, col])[:r]
        pixels = [
            (reflected(row + s - k // 2, height), reflected(col + t - k // 2, width))
            for s in range(k) for t in range(k)]
        values = [linear(attn.qvk, x[b, :, p, q])[r:r + m] for p, q in pixels]
        keys = [linear(attn.qvk, (x if other is None else other)[b, :, p, q])[r + m:] for p, q in pixels]
        if attn.patchwise:
            hidden = linear(attn.weight1, normed(attn.norm1, torch.cat([query, *keys]), i))
            weights = linear(attn.weight2, normed(attn.norm2, hidden, i))
        else:
            scores = []
            for key, pixel in zip(keys, pixels):
                pair = torch.cat([query - key, place(row, col) - place(*pixel)])
                hidden = linear(attn.weight1, normed(attn.norm1, pair, i))
                scores.append(linear(attn.weight2, normed(attn.norm2, hidden, i)))
            weights = torch.cat(scores).softmax(0)
        out[b, :, row, col] = sum(w * v for w, v in zip(weights, values))
    return out


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
@pytest.mark.parametrize('kwargs', [dict(kernel_size=5), dict(kernel_size=1, qkv_bias=False), dict(passes=2)])
def test_attention_is_the_definition(kind, kwargs):
    """By the statistics of each pass, and with given keys."""
    attn, x, other = attention(kind, **kwargs), noise(2, 32, 4, 5), noise(2, 32, 4, 5, seed=2)
    for i in range(kwargs.get('passes', 1)):
        torch.testing.assert_close(attn(x, None, i), reference(attn, x, i))
        torch.testing.assert_close(attn(x, attn.keys(other), i), reference(attn, x, i, other))


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
def test_no_images_and_autocast(kind):
    attn, x = attention(kind).float().requires_grad_(False), noise(4, 32, 5, 4, dtype=torch.float32)
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
    """As in files of version 0.1, which ship."""
    norm, mean, var = PassBatchNorm2d(4, 2), torch.randn(2, 4), torch.rand(2, 4)
    norm.load_state_dict(dict(weight=norm.weight, bias=norm.bias, running_mean=mean, running_var=var))
    for i in range(2):
        assert torch.equal(norm.passes[i].running_mean, mean[i]) and torch.equal(norm.passes[i].running_var, var[i])


def test_bad_arguments_are_named():
    for kwargs, match in (
            (dict(kind='global'), "kind='global': needs one of"), (dict(dim=48), 'dim=48: needs a multiple of 32'),
            (dict(kernel_size=4), 'kernel_size=4: needs an odd number')):
        with pytest.raises(ValueError, match=match):
            SanAttention2d(**dict(dict(dim=32), **kwargs))
    with pytest.raises(ValueError, match=r'\[1, 2, 2, 3\]: needs a height and width of at least 3'):
        attention(kernel_size=5).weights(*2 * [noise(1, 2, 2, 3)])
