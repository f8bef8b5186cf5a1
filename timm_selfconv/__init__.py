from .look.attention_maps import attention_maps
from .models import SAN, ResNetCifar, ResVit, SelfAttentionNet
