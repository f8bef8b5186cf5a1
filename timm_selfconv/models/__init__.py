from ._cifar import CIFAR10_CLASSES, WEIGHTS_DIR
from .resnet_cifar import ResNetCifar
from .self_attention import SelfAttentionNet
