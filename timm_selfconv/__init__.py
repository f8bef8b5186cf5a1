"""Self-attention nets that can express any convolution, as timm models. Importing this package registers them.

- models: the nets, a file per family.
- layers: attention modules and encodings.
- theory: conversions between convolutions and attention, inclusion in richer nets, pruning, fusing for inference.
- look: attention maps, head statistics, the papers' figures, the explorer.
- measure: parameters and FLOPs, the papers' tables, accuracy, speed.
- training: the trainer for one device, and recipes.
- weights: trained weights with cards and histories; loading, saving and publishing.
- data: datasets and pictures. files: atomic writes.
- cli, commands: ``timm-selfconv``, also as ``python -m timm_selfconv``.

Imports run one way: commands; then look, measure, training; then theory, data; then models; then layers, weights.
"""
from .look.attention_maps import attention_maps
from .models import SAN, ResNetCifar, ResVit, SelfAttentionNet
from .theory import fuse
from . import _moved
from .version import __version__

__all__ = ['SAN', 'ResNetCifar', 'ResVit', 'SelfAttentionNet', 'attention_maps', 'fuse']
