import pytest
import timm

from timm_selfconv.measure.counting import count


def test_the_tiny_one_is_as_large_as_the_tiny_attention_net():
    """In parameters, and in FLOPs by the paper's convention."""
    ours, theirs = (count(timm.create_model(f'{name}_tiny_cifar')) for name in ('resnet', 'sa_quadratic'))
    assert ours.parameters == pytest.approx(theirs.parameters, rel=0.001)
    assert ours.linear_conv_flops == pytest.approx(theirs.linear_conv_flops, rel=0.013)
