"""Scores of attention on a grid of pixels: every term of the paper's equation (8) in one module."""
from typing import Any, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from timm.layers import register_notrace_function, trunc_normal_

from .axis_scores import at_least_float32
from .encodings import AbsoluteEncoding, LearnedEncoding, QuadraticEncoding

__all__ = ['ABSOLUTE', 'ENCODINGS', 'RELATIVE', 'TERMS', 'AttentionScores', 'dense_scores', 'from_largest']

TERMS = ('content', 'content_position', 'key_bias', 'position')
RELATIVE = ('quadratic', 'quadratic_gen', 'learned')
ABSOLUTE = ('sinusoid', 'absolute')
ENCODINGS = (*RELATIVE, 'line', *ABSOLUTE)
torch.fx.wrap('at_least_float32')  # fx looks for what it must not enter only where a forward is defined


def check_terms(terms: Sequence[str], encoding: str) -> Tuple[str, ...]:
    """Check that terms and encoding exist and fit each other, and return the terms as a tuple.

    Raises:
        ValueError: If they do not.
    """
    terms = (terms,) if isinstance(terms, str) else tuple(terms)
    if encoding not in ENCODINGS:
        raise ValueError(f'encoding={encoding!r}: needs one of {ENCODINGS}')
    if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(TERMS):
        raise ValueError(f'terms={terms!r}: needs one or more of {TERMS}, each once')
    if encoding in ABSOLUTE and terms != ('content',):
        raise ValueError(f"terms={terms!r}: encoding={encoding!r} is absolute and needs terms=('content',)")
    if encoding == 'line' and ('position' not in terms or 'content_position' in terms):
        raise ValueError(f"terms={terms!r}: encoding='line' needs 'position' and knows no 'content_position'")
    return terms


def from_largest(scores: torch.Tensor) -> torch.Tensor:
    """Scores of an axis without each query's largest: of one, it would swallow the other's, and half precision both."""
    return scores - scores.detach().amax(-1, keepdim=True)


@torch.fx.wrap
@register_notrace_function
def dense_scores(rows: torch.Tensor, cols: torch.Tensor, cross: Optional[torch.Tensor]) -> torch.Tensor:
    """Scores of every query for every key from what the two axes give.

    Args:
        rows: Row scores of Q rows of queries, shape (B, heads, Q, W or 1, H), query before key.
        cols: Column scores, shape (B, heads, Q or 1, W, W).
        cross: What couples the axes, shape (B, heads, Q, W, H, W), or None.

    Returns:
        Scores up to a constant per query, the largest of which is 0, shape (B, heads, Q W, H W).
    """
    rows, cols = from_largest(rows), from_largest(cols)
    scores = rows[..., :, None] + cols[..., None, :]
    if cross is not None:
        scores = scores + cross
        scores = scores - scores.detach().amax((-2, -1), keepdim=True)
    return scores.flatten(4).flatten(2, 3)


class AttentionScores(nn.Module):
    """Scores A of equation (8), as :class:`~timm_selfconv.layers.SelfAttention2d` states it, and their parameters."""
    __constants__ = ('absolute', 'relative', 'separable')  # not Final: torchscript reads a class's own annotations only

    def __init__(
            self,
            dim: int,
            num_heads: int,
            terms: Sequence[str],
            encoding: str,
            grid_size: Tuple[int, int],
            qk_bias: bool,
            device=None,
            dtype=None,
    ):
        """See :class:`~timm_selfconv.layers.SelfAttention2d`, which adds the values."""
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        terms = check_terms(terms, encoding)
        if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f'num_heads={num_heads!r}: needs an integer of at least 1')

        self.terms = terms
        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim ** -0.5
        self.absolute = encoding in ABSOLUTE
        self.relative = 'position' in terms or 'content_position' in terms
        self.separable = terms == ('position',) and encoding in ('quadratic', 'learned')
        has_query = 'content' in terms or 'content_position' in terms
        has_key = 'content' in terms or 'key_bias' in terms

        module: Any = None
        if self.absolute:
            module = AbsoluteEncoding(dim, grid_size, learned=encoding == 'absolute', **dd)
        elif self.relative:
            kept = dict(position='position' in terms, content_position='content_position' in terms)
            if encoding == 'learned':
                module = LearnedEncoding(num_heads, dim, grid_size, **kept, **dd)
            else:
                line_width = grid_size[1] if encoding == 'line' else None
                module = QuadraticEncoding(
                    num_heads, dim, full=encoding == 'quadratic_gen', line_width=line_width, **kept, **dd)
        self.encoding = module
        self.query = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_query else None
        self.key = nn.Linear(dim, num_heads * dim, bias=qk_bias, **dd) if has_key else None
        self.key_bias = nn.Parameter(torch.empty(num_heads, dim, **dd)) if 'key_bias' in terms else None

    def reset_parameters(self) -> None:
        """Initialise what is this module's own; its parts initialise themselves."""
        if self.key_bias is not None:
            trunc_normal_(self.key_bias, std=0.02)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys of x, shape (B, H, W, dim): shape (B, heads, H W, dim). Only attention that looks at keys has them."""
        assert self.key is not None
        if self.absolute:
            x = self.encoding(x)
        return self.key(x).view(x.shape[0], x.shape[1] * x.shape[2], self.num_heads, self.dim).transpose(1, 2)

    def score_parts(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[
            Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor],
            Optional[torch.Tensor]]:
        """The scores' parts, ``query key' + rows + cols + cross`` up to a constant per query.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to meet in the place of x's own, see :meth:`keys`.
            first: First row of queries.
            last: The row after their last; all H by default. There are Q of them.

        Returns:
            Queries over sqrt(D) with ``u`` added, shape (B, heads, Q, W, dim), and keys, (B, heads, H W, dim), or None
            without content and key bias; scores of the terms that know offsets, as encodings give them, or None.
        """
        batch, height, width, dim = x.shape
        if self.key is not None and key is None:
            key = self.keys(x)
        if self.absolute:
            x = self.encoding(x)
        x = x[:, first:last]
        query: Optional[torch.Tensor] = None
        rows: Optional[torch.Tensor] = None
        cols: Optional[torch.Tensor] = None
        cross: Optional[torch.Tensor] = None
        if self.query is not None:
            query = self.query(x).view(batch, x.shape[1], width, self.num_heads, dim)
            query = query.permute(0, 3, 1, 2, 4) * self.scale
        if self.relative:
            rows, cols, cross = self.encoding(query, height, width, first, last)
        if self.key is not None:
            assert key is not None
            if self.key_bias is not None:
                key_bias = self.key_bias[:, None, None].to(key.dtype) * self.scale
                if 'content' in self.terms and query is not None:
                    query = query + key_bias
                else:
                    query = key_bias.expand(batch, -1, x.shape[1], width, -1)
        else:
            query = None
        return query, key, rows, cols, cross

    def query_key_bias(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The scores as ``query key' + bias``, up to a constant per query.

        Arguments, queries and keys are those of :meth:`score_parts`; the bias has the largest score of each query 0 and
        shape (B or 1, heads, Q W, H W).
        """
        query, key, rows, cols, cross = self.score_parts(x, key, first, last)
        bias: Optional[torch.Tensor] = None
        if rows is not None and cols is not None:
            bias = dense_scores(rows, cols, cross)
        return query, key, bias

    def scores(
            self,
            x: torch.Tensor,
            key: Optional[torch.Tensor] = None,
            first: int = 0,
            last: Optional[int] = None,
    ) -> torch.Tensor:
        """Scores A of equation (8) up to a constant per query: shape (B or 1, heads, Q W, H W), query before key.

        Arguments are those of :meth:`score_parts`.
        """
        query, key, bias = self.query_key_bias(x, key, first, last)
        if query is not None and key is not None:
            content = at_least_float32(query.flatten(2, 3) @ key.transpose(-2, -1))
            return content if bias is None else content + bias
        assert bias is not None
        return bias

    def attention_probs(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attention probabilities for an input, whatever path the forward takes.

        Args:
            x: Input, shape (B, H, W, dim).
            key: Keys to meet in the place of x's own, see :meth:`keys`.

        Returns:
            Probabilities before dropout, at least float32, shape (B, heads, H, W, H, W), query before key. Attention
            that does not look at content is expanded over the batch, not copied.
        """
        batch, height, width, _ = x.shape
        probs = self.scores(x, key).softmax(dim=-1)
        probs = probs.view(probs.shape[0], self.num_heads, height, width, height, width)
        return probs.expand(batch, -1, -1, -1, -1, -1)
