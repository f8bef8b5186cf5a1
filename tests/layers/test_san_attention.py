import pytest
import torch
import torch.nn.functional as F

from timm_selfconv.layers.san_attention import PassBatchNorm2d, SanAttention2d
from timm_selfconv.look.attention_maps import footprint_weights
from tiny_nets import noise, randomised


def attention(kind='pairwise', **kwargs):
    """Make a layer in eval mode with parameters and statistics that are neither near zero nor symmetric."""
    attn = randomised(SanAttention2d(64, kind, dtype=torch.float64, **kwargs))
    for statistics in filter(torch.is_floating_point, attn.buffers()):  # without the number of batches
        statistics.uniform_(0.5, 1.5)
    return attn


def unfolded(x, k):
    """Return the footprint of each pixel with reflection at the border, shape (B, C, k^2, H, W)."""
    padded = F.pad(x, [k // 2] * 4, mode='reflect')
    return F.unfold(padded, k).view(*x.shape[:2], k * k, *x.shape[2:])


def reference(attn, x, i=0, other=None):
    """Compute the definition with the statistics of pass i, and with keys of other images if given."""
    k, r, m, (height, width) = attn.kernel_size, 4, 16, x.shape[2:]

    def gamma(pairs):  # BN, ReLU, linear, BN, ReLU, linear, shape (B, C, ...)
        for norm, conv in (attn.norm1, attn.weight1), (attn.norm2, attn.weight2):
            statistics = norm.passes[i]
            pairs = F.batch_norm(pairs, statistics.running_mean, statistics.running_var, norm.weight, norm.bias).relu()
            pairs = F.conv2d(pairs.flatten(2, -2), conv.weight, conv.bias).unflatten(2, pairs.shape[2:-1])
        return pairs

    query, value, key = attn.qvk(x).split([r, m, r], 1)
    key = unfolded(key if other is None else attn.qvk(other)[:, -r:], k)
    if attn.patchwise:
        patch = key.transpose(1, 2).flatten(1, 2)  # offset by offset
        weights = gamma(torch.cat([query, patch], 1)).unflatten(1, (k * k, 2))
    else:
        pixels = torch.cartesian_prod(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)).to(x)
        place = attn.position(pixels.T.reshape(1, 2, height, width))
        there = (place[:, :, None] - unfolded(place, k)).expand(len(x), -1, -1, -1, -1)
        weights = gamma(torch.cat([query[:, :, None] - key, there], 1)).softmax(2).transpose(1, 2)
    weights = weights[:, :, torch.arange(m) % 2]  # channel j uses map j mod (m / 8)
    return (weights * unfolded(value, k).transpose(1, 2)).sum(1)


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
@pytest.mark.parametrize('kwargs', [dict(kernel_size=5), dict(kernel_size=1, qkv_bias=False), dict(passes=2)])
def test_attention_is_the_definition(kind, kwargs):
    """By the statistics of each pass, and with given keys."""
    attn, x, other = attention(kind, **kwargs), noise(2, 64, 4, 5), noise(2, 64, 4, 5, seed=2)
    for i in range(kwargs.get('passes', 1)):
        torch.testing.assert_close(attn(x, None, i), reference(attn, x, i))
        torch.testing.assert_close(attn(x, attn.keys(other), i), reference(attn, x, i, other))


@pytest.mark.parametrize('kind', ['pairwise', 'patchwise'])
def test_no_images_and_autocast(kind):
    attn, x = attention(kind).float().requires_grad_(False), noise(4, 64, 5, 4, dtype=torch.float32)
    assert attn(x[:0]).shape == (0, 16, 5, 4) and footprint_weights(attn, x)[0].shape == (4, 2, 5, 4, 3, 3)
    wanted = attn(x)
    with torch.autocast('cpu', torch.bfloat16):
        out = attn(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))


@pytest.mark.parametrize('momentum', [0.1, None])  # None: the average of all batches
def test_batch_norm_keeps_statistics_a_pass(momentum):
    ours, theirs = PassBatchNorm2d(4, 2), [torch.nn.BatchNorm2d(4, momentum=momentum) for _ in range(2)]
    for i, norm in enumerate(theirs):
        ours.passes[i].momentum = momentum
        for step in range(3):
            x = torch.randn(5, 4, 3, 3) * (i + 1) + step
            torch.testing.assert_close(ours(x, i), norm(x))
    for i, norm in enumerate(theirs):
        statistics = (dict(module.named_buffers()) for module in (ours.passes[i], norm))  # with the number of batches
        torch.testing.assert_close(*statistics)
        torch.testing.assert_close(ours.eval()(x, i), norm.eval()(x))
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
            (dict(kernel_size=4), 'kernel_size=4: needs an odd number'), (dict(passes=0), 'passes=0: needs')):
        with pytest.raises(ValueError, match=match):
            SanAttention2d(**dict(dict(dim=32), **kwargs))
    with pytest.raises(ValueError, match=r'\[1, 4, 2, 3\]: needs a height and width of at least 3'):
        attention(kernel_size=5).weights(*2 * [noise(1, 4, 2, 3)])
