import pytest
import timm
import torch

from timm_selfconv.measure.counting import count
from timm_selfconv.theory import convs_to_attention, encoding_blobs
from timm_selfconv.weights.saving import save_folder


def test_the_tiny_one_is_as_large_as_the_tiny_attention_net():
    """In parameters, and in FLOPs by the paper's convention."""
    ours, theirs = (count(timm.create_model(f'{name}_tiny_cifar')) for name in ('resnet', 'sa_quadratic'))
    assert ours.parameters == pytest.approx(theirs.parameters, rel=0.001)
    assert ours.linear_conv_flops == pytest.approx(theirs.linear_conv_flops, rel=0.013)


@pytest.mark.parametrize('content', [0, 4])
def test_stages_of_attention_begin_in_the_convolutions_weights(content, tmp_path):
    cnn, x = timm.create_model('resnet_tiny_cifar', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
    net = timm.create_model(
        'resnet_tiny_cifar', pretrained=True, attention_stages=['layer3', 'layer4'], attention_alpha=2.,
        attention_content=content).eval()
    expected, _ = convs_to_attention(cnn, ['layer3', 'layer4'], 2.)
    torch.testing.assert_close(net(x), expected(x))
    assert not torch.allclose(net(x), cnn(x), atol=0.1)
    save_folder(net, tmp_path / 'net')
    again = timm.create_model(f'local-dir:{tmp_path / "net"}', pretrained=True).eval()
    torch.testing.assert_close(again(x), net(x))
    blobs = encoding_blobs(net)
    if content:
        assert blobs is None
    else:
        assert [len(b.centers) for b in blobs].count(9) == 10 and len(blobs) == 12
        torch.testing.assert_close(blobs[0].covariances, torch.eye(2).double().expand(9, 2, 2) / 4)


@pytest.mark.parametrize('output_stride', [8, 16, 32])
def test_reductions_equal_the_sizes_of_the_maps(output_stride, small_net, images):
    net = small_net('resnet_tiny_cifar', features_only=True, output_stride=output_stride)
    assert net.feature_info.reduction() == [32 // m.shape[-1] for m in net(images(1, 3, 32, 32))]
