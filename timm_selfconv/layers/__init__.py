"""Attention layers: thin modules over pure functions.

- functional: attention scores, and three formulas that apply them.
- attention: ``SelfAttention2d`` on a grid of pixels, with every term of the paper's equation (8).
- encodings: quadratic, learned and absolute positions.
- san_attention: ``SanAttention2d``, a weight per channel over a small footprint.
- token_attention: ``TokenAttention`` of vision transformers. gated_attention: ``GatedAttention`` of ConViT.
- conv_attention: ``ConvAttention``, one head per tap of a kernel.
- parameters: checks of arguments and weights, selection of heads, parameters without weight decay.
- hooks: layers and their inputs, through hooks.

Only torch and timm.layers are imported here.
"""
from .attention import SelfAttention2d
from .conv_attention import ConvAttention
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding, gaussian_axis_scores
from .gated_attention import GatedAttention
from .parameters import ABSOLUTE, ENCODINGS, RELATIVE, TERMS, no_weight_decay
from .san_attention import PassBatchNorm2d, SanAttention2d
from .token_attention import TokenAttention

__all__ = [
    'ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'TERMS', 'AbsoluteEncoding', 'ConvAttention', 'GatedAttention',
    'LearnedEncoding', 'PassBatchNorm2d', 'QuadraticEncoding', 'SanAttention2d', 'SelfAttention2d', 'TokenAttention',
    'gaussian_axis_scores', 'no_weight_decay',
]
