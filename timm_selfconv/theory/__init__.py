from .attention_to_conv import ConvReport, attention_to_conv, head_kernels, reparameterizable
from .conv_to_attention import ConvAttention, conv_to_attention
from .convs_to_attention import ConversionReport, convs_to_attention
from .inclusion import include
from .head_statistics import acting_taps, center_of_mass, entropy, largest_probability, mean_distance, \
    mirror_symmetry, spread, translation_consistency
from .pruning import condition_numbers, degenerate_heads, precision_eigenvalues, prune_heads
from .residual import ConvResidual, at_taps, conv_residual, interior, tap_offsets
