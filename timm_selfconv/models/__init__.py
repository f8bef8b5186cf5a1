from ._cfg import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, WEIGHTS_DIR, zoo_names
from .resnet_cifar import ResNetCifar
from .resvit import ResVit
from .san import SAN
from .self_attention import SelfAttentionNet
