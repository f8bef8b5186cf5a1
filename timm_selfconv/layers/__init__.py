"""Attention as layers: maths in pure functions, under thin modules.

- attention: ``SelfAttention2d`` on a grid of pixels: its scores, every term of the paper's equation (8), and the path
  from them to its output. encodings: quadratic, learned and absolute positions, with their maths, an axis at a time;
  windows of Gaussian heads on large grids. values: those of heads with few channels. parameters: sizes, terms and
  encodings by name, and parameters of some heads.
- san_attention: ``SanAttention2d``, vectors of weights over a small footprint. footprint: its windows and sums.
- token_attention: ``TokenAttention``, as vision transformers have it. gated_attention: ``GatedAttention``, ConViT's, by
  its factors. conv_attention: ``ConvAttention``, a head per tap of a kernel.
- kernels: how attention is computed, in groups, forward and backward, and where plain operators are needed instead.
- adapters: copies of nets with their adapters merged.

Only torch and timm.layers are imported here.
"""
from .attention import SelfAttention2d
from .conv_attention import ConvAttention
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding, gaussian_axis_scores
from .gated_attention import GatedAttention
from .kernels import separable_attention
from .kernels.kernel import explicit_maps
from .parameters import ABSOLUTE, ENCODINGS, RELATIVE, TERMS
from .san_attention import PassBatchNorm2d, SanAttention2d
from .token_attention import TokenAttention

__all__ = [
    'ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'TERMS', 'AbsoluteEncoding', 'ConvAttention', 'GatedAttention',
    'LearnedEncoding', 'PassBatchNorm2d', 'QuadraticEncoding', 'SanAttention2d', 'SelfAttention2d', 'TokenAttention',
    'explicit_maps', 'gaussian_axis_scores', 'separable_attention',
]
