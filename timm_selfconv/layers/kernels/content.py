"""Attention to keys whose scores are content, a row part and a column part, without a tensor of all scores.

On a CPU by explicit maps of a group of images or of rows of queries, which stays in the cache; the backward pass makes
them again from what came in. Elsewhere by torch's fused attention: row and column scores are more channels of the
queries, which one-hot rows and columns of the keys pick, so that the kernel needs no bias.
"""
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from .kernel import Kernel
from .operators import attend_to_keys

__all__ = ['attend', 'by_keys', 'extended', 'fused_attention', 'gradients']

# bytes of the scores of a group
CPU_BYTES = 4 * 2 ** 20

Optionals = Tuple[Optional[torch.Tensor], ...]


def part(t: torch.Tensor, images: slice, queries: slice) -> torch.Tensor:
    """Some images and rows of queries of a tensor, shape (B or 1, heads, Q or 1, ...)."""
    return t[images if t.shape[0] > 1 else slice(None), :, queries if t.shape[2] > 1 else slice(None)]


def groups(query: torch.Tensor, key: torch.Tensor) -> Iterator[Tuple[slice, slice]]:
    """Images, and rows of their queries, whose scores fit the budget."""
    batch, heads, rows, width, _ = query.shape
    row = max(1, 4 * heads * width * key.shape[2])
    images = max(1, CPU_BYTES // (row * max(1, rows)))
    step = rows if images > 1 else max(1, CPU_BYTES // row)
    for first in range(0, batch, images):
        for start in range(0, rows, step):
            yield slice(first, first + images), slice(start, start + step)


def probabilities(
        query: torch.Tensor,
        key: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Maps of a group, at least float32, shape (images, heads, Q W, N); see `attend_to_keys`."""
    scores = query.flatten(2, 3) @ key.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rows is not None and cols is not None:
        grid = scores.view(*query.shape[:4], rows.shape[-1], cols.shape[-1])
        grid.add_(rows[..., :, None]).add_(cols[..., None, :])
    return scores.softmax(dim=-1)


def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend to keys group by group, out of autograd's sight; see `attend_to_keys`."""
    out = empty(query, key, value, rows, cols)
    grid = out.view(len(out), *query.shape[2:4], *out.shape[2:])
    for images, queries in groups(query, key):
        some = part(query, images, queries)
        scores = (None if t is None else part(t, images, queries) for t in (rows, cols))
        probs = probabilities(some, key[images], *scores).to(value.dtype)
        gathered = (probs @ value[images]).unflatten(2, some.shape[2:4])
        grid[images, queries] = gathered.permute(0, 2, 3, 1, 4)
    return out


def add_to(total: torch.Tensor, some: torch.Tensor, images: slice, queries: slice) -> None:
    """Add a group's gradient of a tensor, shape (B or 1, heads, Q or 1, W or 1, ...), to its part of the whole."""
    whole = part(total, images, queries)
    whole.add_(some.sum_to_size(whole.shape))


def gradients(
        grad: torch.Tensor,
        needs: Sequence[bool],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> List[torch.Tensor]:
    """Gradients of :func:`attend`, nothing where not needed.

    Sums over groups are kept in float32 at least.

    Args:
        grad: Gradient of the result, shape (B, Q W, heads, channels).
        needs: Which arguments of :func:`attend` need theirs.
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, dim).
        key: Keys, shape (B, heads, N, dim).
        value: Values, shape (B, heads or 1, N, channels).
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), N = H W, or None.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), with row scores.
    """
    inputs = query, key, value, rows, cols
    sums = torch.promote_types(query.dtype, torch.float32)
    chunks = list(groups(query, key))
    whole = all(queries.stop >= query.shape[2] for _, queries in chunks)  # keys and values are those of one group
    totals = [torch.empty(query.shape if needs[0] else 0, dtype=query.dtype, device=query.device)] + [
        query.new_empty(0) if t is None or not need else
        torch.zeros(t.shape, dtype=t.dtype if whole and t.dim() == 4 else sums, device=t.device)
        for t, need in zip(inputs[1:], needs[1:])]
    grad = grad.transpose(1, 2).unflatten(2, query.shape[2:4])
    # Each group's map is made again. Softmax's gradient, p (g - sum p g), is formed in place of g; its sum over key
    # columns is that of row scores, over key rows that of column scores. A group has its queries' gradients whole, but
    # gives keys and values only a share, which is added up.
    for images, queries in chunks:
        some, keys, values = part(query, images, queries), key[images], value[images]
        back = part(grad, images, queries).flatten(2, 3)
        probs = probabilities(some, keys, *(None if t is None else part(t, images, queries) for t in (rows, cols)))
        if needs[2]:
            totals[2][images] += (probs.to(back.dtype).transpose(-2, -1) @ back).sum_to_size(values.shape)
        of_scores = (back @ values.transpose(-2, -1)).to(sums)
        of_scores.sub_((probs * of_scores).sum(-1, keepdim=True)).mul_(probs)
        if rows is not None and cols is not None:
            grid = of_scores.view(*some.shape[:4], rows.shape[-1], cols.shape[-1])
            if needs[3]:
                add_to(totals[3], grid.sum(-1), images, queries)
            if needs[4]:
                add_to(totals[4], grid.sum(-2), images, queries)
        of_scores = of_scores.to(key.dtype)
        if needs[0]:
            part(totals[0], images, queries).copy_((of_scores @ keys).view(some.shape))
        if needs[1]:
            totals[1][images] += of_scores.transpose(-2, -1) @ some.flatten(2, 3)
    return [total if t is None else total.to(t.dtype) for total, t in zip(totals, inputs)]


def empty(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Shapes and dtypes that :func:`attend` returns, for tracing."""
    return value.new_empty(query.shape[0], query.shape[2] * query.shape[3], query.shape[1], value.shape[3])


by_keys = Kernel('keys', attend, gradients, attend_to_keys, empty)


def extended(
        query: torch.Tensor,
        key: torch.Tensor,
        rows: torch.Tensor,
        cols: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose products are all scores.

    Args:
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, dim).
        key: Keys, shape (B, heads, H W, dim).
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), the largest 0.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), the largest 0.

    Returns:
        Queries, shape (B, heads, Q W, channels), and keys, (B, heads, H W, channels), with as many channels, a multiple
        of 8, as fused kernels ask for.
    """
    height, width = rows.shape[-1], cols.shape[-1]
    shape, padding = query.shape[:4], -(query.shape[4] + height + width) % 8
    lowest = 0.25 * torch.finfo(query.dtype).min  # infinity times 0 is no number
    parts = [query] + [t.clamp(min=lowest).to(query.dtype).expand(*shape, -1) for t in (rows, cols)]
    eyes = [torch.eye(n, device=key.device, dtype=key.dtype) for n in (height, width)]
    places = torch.cat([eyes[0].repeat_interleave(width, 0), eyes[1].repeat(height, 1)], dim=1)
    keys = torch.cat([key, places.expand(*key.shape[:2], -1, -1)], dim=-1)
    return F.pad(torch.cat(parts, dim=-1).flatten(2, 3), (0, padding)), F.pad(keys, (0, padding))


def fused_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """`attend_to_keys` by torch's fused attention, its probabilities dropped at a rate."""
    channels, value = value.shape[3], value.expand(-1, query.shape[1], -1, -1)
    if rows is None or cols is None:
        query = query.flatten(2, 3)
    else:
        query, key = extended(query, key, rows, cols)
        value = F.pad(value, (0, query.shape[3] - channels))  # the fastest kernels take one width
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, scale=1.)
    return out[..., :channels].transpose(1, 2)
