"""Position encodings of the paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584).

- quadratic, equation (9): a head is a Gaussian around an offset, isotropic or with a full precision (appendix D.1).
- learned: a table of row offsets and a table of column offsets (Ramachandran et al., 2019).
- absolute, equations (3) and (7): one vector per position, sinusoid or learned.

Position scores of the first two are a row score plus a column score, so the softmax over all keys is the product of a
softmax over rows and a softmax over columns. Only the off-diagonal entry of a full precision couples the axes.
"""
from .absolute import AbsoluteEncoding
from .learned import LearnedEncoding, resample_table
from .quadratic import QuadraticEncoding, axis_offsets, gaussian_axis_scores

__all__ = [
    'AbsoluteEncoding', 'LearnedEncoding', 'QuadraticEncoding', 'axis_offsets', 'gaussian_axis_scores',
    'resample_table',
]
