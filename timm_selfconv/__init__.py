"""Self-attention nets that contain every convolution, as timm models: importing this package registers them.

- models: the nets, a file per family; here lie what they are, how they load and how one is added.
- layers: their attention, as pure functions under thin modules.
- theory: the papers' theorem as code: convolutions as attention and back, nets as richer nets, pruning,
  fusing for inference.
- look: what a net sees: attention maps, heads, the papers' figures, the explorer.
- measure: what a net costs and how good it is: counts, the papers' tables, accuracy, speed.
- training: the trainer on one device, ``timm-selfconv train RECIPE``, and the keys of recipes. train: its command.
- weights: trained weights, their cards and histories: how they are found, checked, saved and published.
- data: datasets and pictures. files: atomic writes.
- cli: the command ``timm-selfconv``, ``python -m timm_selfconv`` where it is not installed; commands: what it does.

Imports run one way: cli, then look, measure and training, then theory and data, then models, then layers and weights,
which import no other of these.
"""
from .look.attention_maps import attention_maps
from .models import SAN, ResNetCifar, ResVit, SelfAttentionNet
from .theory import fuse
from . import _moved
from .version import __version__

__all__ = ['SAN', 'ResNetCifar', 'ResVit', 'SelfAttentionNet', 'attention_maps', 'fuse']
