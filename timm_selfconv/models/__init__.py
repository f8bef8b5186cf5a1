from .resnet_cifar import ResNetCifar
from .self_attention import SelfAttentionNet
