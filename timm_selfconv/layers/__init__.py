"""Attention as layers: maths in pure functions, under thin modules.

- attention: ``SelfAttention2d`` on a grid of pixels, every term of the paper's equation (8).
- encodings: what its queries know about where a key lies: quadratic, learned and absolute encodings. axis_scores:
  their maths, an axis at a time.
- san_attention: ``SanAttention2d``, vectors of weights over a small footprint. footprint: its windows and sums.
- kernels: how attention is computed, in groups, forward and backward.
- token_attention: ``TokenAttention``, as vision transformers have it. gated_attention: ``GatedAttention``, ConViT's, by
  its factors. mlp: ``Mlp``, timm's, that keeps less.
- linear: linear maps and products of matrices, by the fastest kernel of a CPU.
- onlookers: who looks on, so that what is faster but looks different must wait.

Nothing but torch and timm.layers is imported here.
"""
from .attention import ABSOLUTE, ENCODINGS, RELATIVE, TERMS, SelfAttention2d, check_terms, dense_scores, explicit_maps
from .axis_scores import axis_offsets, gaussian_axis_scores, precision_matrices, relative_table, resample_table
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding
from .gated_attention import GatedAttention
from .kernels import key_attention, map_attention, separable_attention
from .mlp import Mlp
from .onlookers import hooked, must_be_plain, operators_only
from .san_attention import PassBatchNorm2d, PointwiseConv2d, SanAttention2d
from .token_attention import TokenAttention
