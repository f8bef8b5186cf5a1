"""Position encodings: scores by where a key lies relative to a query, or by where both lie.

The paper (Cordonnier, Loukas, Jaggi, ICLR 2020, arXiv:1911.03584) writes every attention score as a sum of terms in the
relative encoding ``r_delta`` of the offset ``delta = key - query``, in pixels (its equation 8). Three kinds of encoding
stand here, thin modules over functions of an axis:

- quadratic, equation (9): a head is a Gaussian of centre ``Delta`` and precision ``Sigma^-1`` around the query,
  isotropic or with a full 2 x 2 precision (appendix D.1), or with one of rank 1 along a line of numbered offsets;
- learned: one table for row offsets, one for column offsets (Ramachandran et al., 2019);
- absolute, equations (3) and (7): one vector per position, sinusoid or learned, added to what is scored.

Scores of the first two are a row part plus a column part, so a softmax over all keys is the product of a softmax over
key rows and one over key columns. Only the off-diagonal entry of a full precision couples the two axes.
"""
from .absolute import AbsoluteEncoding
from .learned import LearnedEncoding, resample_table
from .quadratic import QuadraticEncoding, axis_offsets, gaussian_axis_scores

__all__ = [
    'AbsoluteEncoding', 'LearnedEncoding', 'QuadraticEncoding', 'axis_offsets', 'gaussian_axis_scores',
    'resample_table',
]
