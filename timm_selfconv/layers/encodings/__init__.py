"""Position encodings, relative and absolute.

The paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584) writes every attention score as a sum of terms in the
relative encoding ``r_delta`` of the offset ``delta = key - query``, in pixels (equation 8). There are three encodings:

- quadratic, equation (9): a head is a Gaussian of centre ``Delta`` and precision ``Sigma^-1`` around the query,
  isotropic or with a full 2 x 2 precision (appendix D.1);
- learned: a table of row offsets and a table of column offsets (Ramachandran et al., 2019);
- absolute, equations (3) and (7): one vector per position, sinusoid or learned, added to the input of queries and keys.

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
