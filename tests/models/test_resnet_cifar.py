import timm
import torch

import timm_selfconv


def test_published_parameters_to_the_digit():
    model = timm.create_model('resnet18_cifar', device='meta')
    assert isinstance(model, timm_selfconv.ResNetCifar)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962


def test_stem_keeps_the_resolution():
    model = timm.create_model('resnet18_cifar', in_chans=1, features_only=True).eval()
    features = model(torch.randn(1, 1, 32, 32))
    assert [f.shape[-1] for f in features] == [32, 32, 16, 8, 4]
    assert model.feature_info.reduction() == [1, 1, 2, 4, 8]
    assert model.feature_info.channels() == [64, 64, 128, 256, 512]
