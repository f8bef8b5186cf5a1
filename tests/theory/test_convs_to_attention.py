import copy
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torchvision
from timm.layers import BlurPool2d, Conv2dSame

from timm_selfconv.theory import ConvAttention, convs_to_attention
from tiny_nets import noise

MODEL = timm.create_model('resnet_tiny_cifar', channels=(4, 4, 4, 4), layers=(1, 1, 1, 1)).eval()


def convolutions(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]


@pytest.mark.slow
@pytest.mark.parametrize('create,size,convs,heads', [
    (partial(timm.create_model, 'resnet18', zero_init_last=False), (64, 64), 20, 49 + 16 * 9 + 3),
    (partial(timm.create_model, 'mixnet_s'), (64, 64), 123, None),  # MixedConv2d, kernels up to 11 x 11
    (torchvision.models.shufflenet_v2_x0_5, (64, 64), 56, None),
    (torchvision.models.video.r3d_18, (4, 32, 32), 20, None),  # Conv3d, by subclasses of it
])
def test_nets_stay_the_same_function(create, size, convs, heads):
    """The difference is small against the variation of logits between images, with the batch's statistics in norms."""
    torch.manual_seed(0)
    model, x = create().train(), noise(3, 3, *size, dtype=torch.float32)
    attention, report = convs_to_attention(model, input_size=(3, *size))
    with torch.no_grad():
        expected = model(x)
        variation = expected.std(dim=0).mean()
        assert variation > 1e-2 * expected.abs().max()
        assert (attention(x) - expected).abs().max() < 1e-3 * variation
    assert report.convs == convs == len(convolutions(model)) and not convolutions(attention)
    assert report.heads == (heads or sum(c.weight[0, 0].numel() for c in convolutions(model)))


def test_costs_in_closed_form():
    """12 x 12 keys, 6 x 6 queries, 5 input and 7 output channels."""
    conv = nn.Conv2d(5, 7, 3, stride=2, padding=1)
    attention, report = convs_to_attention(conv, input_size=(5, 12, 12))
    assert isinstance(attention, ConvAttention) and report.convs == 1 and report.heads == 9
    assert report.flops_before == 2 * 6 * 6 * 9 * 5 * 7
    assert report.flops_after == 2 * 9 * (12 * 6 * 12 * 5 + 6 * 6 * 12 * 5 + 6 * 6 * 5 * 7)
    assert (report.parameters_before, report.parameters_after) == (9 * 35 + 7, 9 * 35 + 7 + 27)
    ratio = report.flops_after / report.flops_before
    assert str(report).startswith(f'1 convolution is 9 heads; 27 more parameters; {ratio:.1f} times the FLOPs; error ')


def test_the_net_is_left_alone_and_everything_else_kept():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False), nn.Dropout(0.5))
    model[1].eval()
    model[3].requires_grad_(False).eval()
    before = copy.deepcopy(model)
    attention, _ = convs_to_attention(model, alpha=32., input_size=(3, 6, 6))
    torch.testing.assert_close(model.state_dict(), before.state_dict())
    assert [type(m) for m in attention] == [ConvAttention, nn.BatchNorm2d, nn.ReLU, ConvAttention, nn.Dropout]
    assert [m.training for m in attention] == [m.training for m in model] == [True, False, True, False, True]
    assert [p.requires_grad for p in attention[3].parameters()] == [False] * 3
    assert attention[0].spreads.tolist() == [8.] * 9
    assert attention[1].weight is not model[1].weight


@pytest.mark.parametrize('where,pattern', [
    (['layer1.*.conv2', 'layer3'], r'layer1\.\d\.conv2|layer3\.'), ('*.downsample', r'.*downsample')])
def test_chosen_convolutions(where, pattern):
    attention, report = convs_to_attention(MODEL, where, input_size=(3, 16, 16))
    names = {name for name, m in MODEL.named_modules() if isinstance(m, nn.Conv2d) and re.match(pattern, name)}
    assert {name for name, m in attention.named_modules() if isinstance(m, ConvAttention)} == names
    assert report.convs == len(names) and report.error < 1e-4


class Odd(nn.Module):
    """Reads the device of its convolution's weight, and returns more than a tensor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (3, 1), groups=2)

    def forward(self, x):
        return self.conv(x.to(self.conv.weight.device)), 3, None


def test_the_error_is_that_of_all_outputs():
    odd, x = Odd(), torch.randn(1, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    attention, report = convs_to_attention(odd, alpha=1., input_size=(2, 9, 9))
    expected = odd(x)[0]
    assert report.error == pytest.approx(float((attention(x)[0] - expected).norm() / expected.norm()), rel=1e-4)


def test_a_convolution_used_twice_is_one_attention():
    """Convolutions by functions can be left out."""
    conv, x = nn.Conv2d(4, 4, 3, padding=1), noise(2, 4, 6, 7, dtype=torch.float32)
    shared = nn.Sequential(nn.Sequential(conv, nn.ReLU(), conv), conv, BlurPool2d(4))
    attention, report = convs_to_attention(shared, '0', input_size=(4, 5, 5))
    assert attention[0][0] is attention[0][2] is attention[1] and (report.convs, report.heads) == (1, 9)
    torch.testing.assert_close(attention(x), shared(x))


def test_the_same_padding_of_tensorflow_follows_the_input():
    torch.manual_seed(0)
    conv = Conv2dSame(3, 4, (3, 5), stride=(2, 3), dilation=(2, 1))
    attention, _ = convs_to_attention(conv, input_size=(3, 16, 16))
    for size in ((7, 8), (8, 9), (9, 10), (16, 5)):
        x = noise(2, 3, *size, dtype=torch.float32)
        torch.testing.assert_close(attention(x), conv(x))


def twice_the_weight():
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize('build,where,match', [
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BlurPool2d(4)), None, 'functional convolutions in 1 cannot be'),
    (lambda: nn.Sequential(nn.ConvTranspose2d(3, 3, 3)), None, "'0': conv=ConvTranspose2d: needs an"),
    (twice_the_weight, None, "convolution '0' shares parameters"),
    (nn.Flatten, None, 'model=Flatten: has no convolutions'),
    (lambda: MODEL, ['layer2', 'layr3'], r"has no convolutions in where=\['layr3'\], but in conv1, layer1\.0\.conv1"),
    (lambda: MODEL, [], r'has no convolutions in where=\[\], but in conv1'),
])
def test_nets_that_cannot_be_converted_are_refused(build, where, match):
    with pytest.raises(ValueError, match=match):
        convs_to_attention(build(), where, input_size=(3, 64, 64))
