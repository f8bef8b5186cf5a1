from .models import ResNetCifar, SelfAttentionNet
