"""The theorem as code.

- conv_to_attention: one convolution, or the convolutions of a net, as attention (Theorem 1).
- line_encoding: Theorem 1 with an encoding of two dimensions.
- attention_to_conv: a convolution that approximates an attention layer, or each layer of a net.
- learned_kernels: the convolution that a layer learned; shifts: heads as shifts of the image.
- inclusion: a net as a richer net with the same logits.
- gaussians: heads as Gaussians around the query.
- residual: distance of a layer from every convolution (Lemmas 1 and 3); head_statistics: statistics of heads.
- pruning: smaller nets: without degenerate heads (appendix E), or fused for inference.
"""
from timm_selfconv.layers import ConvAttention
from .attention_to_conv import attention_to_conv, attention_to_convs, head_kernels
from .conv_to_attention import ConversionReport, conv_to_attention, convs_to_attention
from .gaussians import Blobs, position_blobs
from .head_statistics import center_of_mass, entropy, mean_distance, mirror_symmetry, overlap, spread, \
    translation_consistency
from .inclusion import include
from .learned_kernels import HeadOffset, LearnedKernel, learned_kernel, learned_kernels, untrained_copy
from .line_encoding import line_maps, offset_numbers
from .pruning import condition_numbers, degenerate_heads, fuse, precision_eigenvalues, prune_heads, truncate_values
from .residual import ConvResidual, at_taps, conv_residual, interior, tap_offsets
from .shifts import ShiftAttention2d, ShiftReport, to_shifts, with_shifts
