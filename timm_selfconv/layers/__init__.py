from .attention import ABSOLUTE, ENCODINGS, RELATIVE, TERMS, SelfAttention2d, check_terms, dense_scores, \
    separable_attention
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding, axis_offsets, gaussian_axis_scores, \
    precision_matrices, relative_table, resample_table
from .san_attention import PassBatchNorm2d, SanAttention2d
from .token_attention import TokenAttention
