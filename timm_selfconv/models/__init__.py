from ._cifar import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, WEIGHTS_DIR
from .resnet_cifar import ResNetCifar
from .self_attention import SelfAttentionNet
