from ._base import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, WEIGHTS_DIR
from .resnet_cifar import ResNetCifar
from .resvit import ResVit
from .san import SAN
from .self_attention import SelfAttentionNet
