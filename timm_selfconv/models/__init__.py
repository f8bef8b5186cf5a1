"""timm models, one file per family; README.md is the quickstart.

- self_attention: ``sa_*``, the paper's nets and the report's hierarchical ones.
- san: ``san_*``, vector attention over a footprint, plain and hierarchical.
- resvit: ``resvit_*``, vision transformers on a ResNet's first stage, plain and hierarchical.
- resnet_cifar: ``resnet*_cifar``, the convolutional baselines.
- fused_convit: timm's ``convit_*``, faster and at any size.
- _base: the shared base classes. _cfg: pretrained configurations. _released: checkpoints of the released code.
"""
from ._cfg import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, zoo_names
from .fused_convit import FusedConVit, fuse_convit
from .resnet_cifar import ResNetCifar
from .resvit import ResVit
from .san import SAN
from .self_attention import SelfAttentionNet
