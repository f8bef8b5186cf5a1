"""Counts equal sums by hand and the matrix products that torch dispatches."""
import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv import fuse
from timm_selfconv.layers import TERMS
from timm_selfconv.measure.counting import count
from tiny_nets import FAMILIES, ONE_LAYER, SHALLOW

N, D, M = 256, 400, 512  # positions, channels, MLP channels
# multiply-adds per head; tables of relative positions have 200 channels for 32 rows and columns
SEPARABLE, EXPLICIT, QUERY_KEY, CONTENT_POSITION = N * 32 * D, N * N * D, 2 * N * D * D, N * 32 * 200
BOTH_PATHS = QUERY_KEY + CONTENT_POSITION + 2 * EXPLICIT  # q k', tables met by queries, probabilities times values


def net(heads, per_head=0):
    """Return 2 x multiply-adds of stem (12 -> D), layers (value, projection and MLP) and head."""
    layers = [h * (N * D * D + per_head) + N * (D * D + 2 * D * M) for h in heads]
    return 2 * (N * 12 * D + sum(layers) + D * 10)


@pytest.mark.parametrize('name,heads,linear,default,dense,published', [
    ('sa_quadratic_cifar', (9,) * 6, 0, SEPARABLE, EXPLICIT, 6.2),
    ('sa_quadratic_gen_pruned_cifar', (7, 5, 8, 7, 3, 9), 0, EXPLICIT, EXPLICIT, 4.9),
    ('sa_learned_content_cifar', (9,) * 6, QUERY_KEY, BOTH_PATHS, BOTH_PATHS, 15.),
])
def test_attention_nets_by_hand(name, heads, linear, default, dense, published):
    counts = count(timm.create_model(name))
    assert counts.linear_conv_flops == net(heads, linear)
    assert counts.linear_conv_flops / 1e9 == pytest.approx(published, abs=0.05)
    assert counts.flops == net(heads, default)
    assert counts.dense_flops == net(heads, dense)
    # fvcore adds five per element of LayerNorms, rounds einsums to four digits, and counts the columns of one row of 16
    macs = net(heads, default) // 2 + 12 * 5 * N * D - (15 * 16 * 16 * D * sum(heads) if default == SEPARABLE else 0)
    assert abs(counts.fvcore_macs - macs) <= (sum(heads) * CONTENT_POSITION * 1e-3 if linear else 0)


def test_resnet_by_hand():
    """3 x 3 convolutions of 1, 4, 4, 4, 4 (stem and stages) and the 1 x 1 shortcuts."""
    macs = 32 * 32 * 9 * (3 * 64 + 4 * 64 * 64) + 512 * 10
    for channels, side in ((128, 16), (256, 8), (512, 4)):
        macs += side ** 2 * (9 * (channels // 2 * channels + 3 * channels ** 2) + channels // 2 * channels)
    counts = count(timm.create_model('resnet18_cifar'))
    assert counts.linear_conv_flops == counts.dense_flops == counts.flops == 2 * macs
    assert f'{counts.flops / 1e9:.1f}B' == '1.1B'


def dispatched(model, input_size=(3, 32, 32)):
    """Return FLOPs of the matrix products that torch dispatches on a CPU.

    SDPBackend.MATH splits fused attention into products. Hooks make the layer compute its keys.
    """
    for name, module in model.named_modules():
        if name.endswith('attn.key'):
            module.register_forward_hook(lambda module, args, out: None)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.zeros(1, *input_size))
    return counter.get_total_flops()


@pytest.mark.parametrize('name,kwargs', [
    *((name, SHALLOW[name]) for name in FAMILIES),
    *(('sa_quadratic_cifar', dict(ONE_LAYER, encoding=encoding, terms=TERMS)) for encoding in ('learned', 'quadratic')),
    ('sa_quadratic_cifar', dict(ONE_LAYER, encoding='absolute', terms=('content',)))])
def test_nets_of_every_family_are_counted_whole(name, kwargs):
    model = timm.create_model(name, **kwargs)
    counts = count(model)
    assert counts.linear_conv_flops <= counts.flops <= counts.dense_flops
    assert counts.flops == dispatched(model)
    for module in model.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = False
    assert counts.dense_flops == dispatched(model)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['resnet50', 'vit_tiny_patch16_224'])
def test_nets_of_timm_are_counted_whole(name):
    model = timm.create_model(name)
    counts = count(model, (3, 224, 224))
    assert counts.flops == dispatched(model, (3, 224, 224))
    if name == 'resnet50':
        assert f'{counts.flops / 2e9:.2f}' == '4.09'  # as torchvision states it
    if name == 'vit_tiny_patch16_224':  # fvcore adds five per element of LayerNorms
        assert counts.fvcore_macs - counts.flops // 2 == 25 * 5 * 197 * 192


def test_counts_follow_the_image_and_change_no_model():
    model = timm.create_model('sa_quadratic_tiny_cifar', depth=1).train()
    model.head.eval()  # like a frozen part
    small, large = count(model), count(model.requires_grad_(False), (3, 64, 64))
    assert large.parameters == small.parameters == sum(p.numel() for p in model.parameters())
    head = 2 * 96 * 10
    assert large.linear_conv_flops - head == 4 * (small.linear_conv_flops - head)
    assert model.training and not model.head.training and all(block.attn.fused_attn for block in model.blocks)
    with pytest.raises(ValueError, match='multiples of 4'):
        count(model, (3, 30, 30))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_fused_nets_spare_the_second_linear_of_each_layer():
    """One layer of 96 channels on 8 x 8 positions."""
    model = timm.create_model('sa_quadratic_tiny_cifar', depth=1)
    assert count(fuse(model)).flops == count(model).flops - 2 * 64 * 96 * 96
