"""ResNet-18 for CIFAR-10, the convolutional baseline of both papers.

'Deep Residual Learning for Image Recognition', He, Zhang, Ren, Sun, CVPR 2016
- https://arxiv.org/abs/1512.03385
"""
import functools
from typing import Any, Tuple, Union

import torch.nn as nn

from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet

from ._cfg import build_net, cifar_cfgs

__all__ = ['ResNetCifar']


class ResNetCifar(ResNet):
    """timm's ResNet with a stem for 32 x 32 images: a 3x3 convolution of stride 1 and no max-pool."""

    def __init__(
            self,
            in_chans: int = 3,
            num_classes: int = 10,
            img_size: Union[int, Tuple[int, int], None] = None,
            device: Any = None,
            dtype: Any = None,
            **kwargs: Any,
    ):
        """
        Args:
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features only.
            img_size: Ignored, because the net takes any size.
            **kwargs: Arguments of timm's ResNet.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(in_chans=in_chans, num_classes=num_classes, **kwargs, **dd)
        conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False, **dd)
        nn.init.kaiming_normal_(conv1.weight, mode='fan_out', nonlinearity='relu')
        self.add_module('conv1', conv1)
        self.add_module('maxpool', nn.Identity())
        info: Any
        for info in self.feature_info:  # timm counts a stem of stride 4
            info['reduction'] = max(1, info['reduction'] // 4)


default_cfgs = generate_default_cfgs(cifar_cfgs(
    'resnet18_cifar',
    'resnet_tiny_cifar',
    pool_size=(4, 4), first_conv='conv1', classifier='fc',
    paper_ids='arXiv:1512.03385', paper_name='Deep Residual Learning for Image Recognition',
))

_create_resnet = functools.partial(build_net, ResNetCifar)


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> ResNetCifar:
    """ResNet-18 with a 3x3 stem (11.2M parameters; published 93.8 % by the paper, 94.6 % by its reproduction)."""
    model_args = dict(block=BasicBlock, layers=(2, 2, 2, 2))
    return _create_resnet('resnet18_cifar', pretrained, **dict(model_args, **kwargs))


@register_model
def resnet_tiny_cifar(pretrained: bool = False, **kwargs: Any) -> ResNetCifar:
    """A small ResNet with the parameters and FLOPs of `sa_quadratic_tiny_cifar`, within 1.3 %."""
    model_args = dict(block=BasicBlock, layers=(2, 2, 3, 2), channels=(16, 32, 64, 128))
    return _create_resnet('resnet_tiny_cifar', pretrained, **dict(model_args, **kwargs))
