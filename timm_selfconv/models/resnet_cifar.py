"""ResNet-18 for CIFAR-10, the convolutional baseline of both papers.

'Deep Residual Learning for Image Recognition', He, Zhang, Ren, Sun, CVPR 2016
- https://arxiv.org/abs/1512.03385
"""
from typing import Any, Dict, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn

from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet

from timm_selfconv.layers import ConvAttention, no_weight_decay
from ._cfg import build_net, cifar_cfgs

__all__ = ['ResNetCifar']


class ResNetCifar(ResNet):
    """timm's ResNet with a stem for 32 x 32 images: a 3x3 convolution of stride 1 and no max-pool.

    Stages can use attention by position, with one head per kernel tap (Theorem 1), as in Transformed CNNs (d'Ascoli et
    al., 2021). With ``pretrained=True`` attention starts from the weights of the convolutions.
    """

    def __init__(
            self,
            in_chans: int = 3,
            num_classes: int = 10,
            img_size: Union[int, Tuple[int, int], None] = None,
            attention_stages: Sequence[str] = (),
            attention_alpha: float = 3.,
            attention_content: int = 0,
            device: Any = None,
            dtype: Any = None,
            **kwargs: Any,
    ):
        """
        Args:
            in_chans: Channels of the images.
            num_classes: Number of classes, 0 for features only.
            img_size: Ignored, because the net takes any size.
            attention_stages: Stages with attention in place of convolutions, from 'layer1' to 'layer4'.
            attention_alpha: Initial inverse width of the Gaussian of each head.
            attention_content: Channels of queries and keys for attention to content, 0 for none.
            **kwargs: Arguments of timm's ResNet.

        Raises:
            ValueError: If a stage does not exist.
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
        if not set(attention_stages) <= {'layer1', 'layer2', 'layer3', 'layer4'}:
            raise ValueError(f"attention_stages={attention_stages!r}: needs some of 'layer1' to 'layer4'")
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.Conv2d) and name.partition('.')[0] in attention_stages:
                self.set_submodule(name, ConvAttention(module, attention_alpha, attention_content))

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return no_weight_decay(self)


def checkpoint_filter_fn(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """Initialise attention from the weights of the convolutions that it replaces."""
    state_dict = dict(state_dict)
    for name, module in model.named_modules():
        if isinstance(module, ConvAttention) and f'{name}.weight' in state_dict:
            state_dict[f'{name}.value_weight'] = state_dict.pop(f'{name}.weight').flatten(2).permute(2, 0, 1)
            for key, value in module.state_dict().items():
                state_dict.setdefault(f'{name}.{key}', value)
    return state_dict


def _create_resnet(variant: str, pretrained: bool, **kwargs: Any) -> ResNetCifar:
    return build_net(ResNetCifar, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs)


default_cfgs = generate_default_cfgs(cifar_cfgs(
    'resnet18_cifar',
    'resnet_tiny_cifar',
    pool_size=(4, 4), first_conv='conv1', classifier='fc',
    paper_ids='arXiv:1512.03385', paper_name='Deep Residual Learning for Image Recognition',
))


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
