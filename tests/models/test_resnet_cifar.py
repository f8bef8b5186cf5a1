import pytest
import timm
import torch

from timm_selfconv.measure.counting import count


def test_stem_keeps_the_resolution():
    model = timm.create_model('resnet18_cifar', in_chans=1, features_only=True).eval()
    features = model(torch.randn(1, 1, 32, 32))
    assert [f.shape[-1] for f in features] == [32, 32, 16, 8, 4]
    assert model.feature_info.reduction() == [1, 1, 2, 4, 8]
    assert model.feature_info.channels() == [64, 64, 128, 256, 512]


def test_the_tiny_one_is_as_large_as_the_tiny_attention_net():
    """In parameters, and in FLOPs by the paper's convention."""
    ours, theirs = (count(timm.create_model(f'{name}_tiny_cifar')) for name in ('resnet', 'sa_quadratic'))
    assert ours.parameters == pytest.approx(theirs.parameters, rel=0.001)
    assert ours.linear_conv_flops == pytest.approx(theirs.linear_conv_flops, rel=0.013)
