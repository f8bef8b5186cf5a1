"""Position-only attention by heads at their rank, to a tolerance.

A wide head is smooth: on a grid a Gaussian of standard deviation ``s`` pixels has a rank of about 1.7 / s of an axis'
positions at 1e-6. With ``R_h = U_1 V_1`` and ``C_h = U_2 V_2`` of ranks r_1 and r_2

    (R_h (x) C_h) x W_h  =  (U_1 (x) U_2) ((V_1 (x) V_2) x W_h)

has its value product, most of a layer's work, on r_1 r_2 positions instead of H W.
"""
import functools
from typing import List, NamedTuple, Optional, Tuple

import torch

from .kernel import CPU_BYTES, autocast_dtype

__all__ = ['Head', 'low_rank', 'low_rank_attention', 'work_out']

# what a multiply-add along an axis costs, in those of the value product: its sums are short and memory bounds it
AXIS_COST = {torch.float64: 2., torch.float32: 4.}
HALF_AXIS_COST = 8.


class Head(NamedTuple):
    """A head on one grid: pixels meet keys of both axes (all pixels stay where these are None), then queries.

    Attributes:
        key_rows: ``V_1``, shape (r_1, H).
        key_cols: ``V_2``, shape (r_2, W).
        query_rows: ``U_1``, shape (H, r_1).
        query_cols: ``U_2``, shape (W, r_2).
    """
    key_rows: Optional[torch.Tensor]
    key_cols: Optional[torch.Tensor]
    query_rows: torch.Tensor
    query_cols: torch.Tensor


def low_rank(matrix: torch.Tensor, tolerance: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Factors of the smallest rank whose product is within a tolerance, in operator norm, of a matrix.

    Args:
        matrix: Shape (n, m).
        tolerance: Largest singular value that may be left out.

    Returns:
        Factors of shapes (n, rank) and (rank, m), the rows of the second orthonormal.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > tolerance).sum())
    return u[:, :rank] * s[:rank], v[:rank]


def head_factors(rows: torch.Tensor, cols: torch.Tensor, tolerance: float, dim: int, axis_cost: float) -> Head:
    """Choose the cheaper way for a head of some channels: at its rank, or at all positions.

    What is left out of ``R (x) C`` has singular values ``s_i t_j``, of which one factor is out of its own axis' rank.
    Its operator norm is the largest of these: ``s_i`` times the norm of C, or ``t_j`` times that of R.

    Args:
        rows: R, shape (H, H).
        cols: C, shape (W, W).
        tolerance: Operator norm that what is left out of ``R (x) C`` may have.
        dim: Channels.
        axis_cost: Cost of a multiply-add along an axis, in those of the value product.
    """
    height, width = len(rows), len(cols)
    u1, v1 = low_rank(rows, tolerance / float(torch.linalg.matrix_norm(cols, 2)))
    u2, v2 = low_rank(cols, tolerance / float(torch.linalg.matrix_norm(rows, 2)))
    r1, r2 = len(v1), len(v2)
    full = height * width * (dim + axis_cost * (height + width))
    axes = r1 * width * (height + r2) + height * r2 * (r1 + width)
    return Head(v1, v2, u1, u2) if r1 * r2 * dim + axis_cost * axes < full else Head(None, None, rows, cols)


@functools.lru_cache(maxsize=128)
def remembered(
        probs: bytes,
        shape: Tuple[int, int, int],
        tolerance: float,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
) -> List[Head]:
    """:func:`work_out` of float64 probabilities, those of rows before those of columns: remembered by their values."""
    heads, height, width = shape
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        rows, cols = torch.frombuffer(bytearray(probs), dtype=torch.float64).split(
            [heads * height * height, heads * width * width])
        found = [
            head_factors(r, c, tolerance, dim, AXIS_COST.get(dtype, HALF_AXIS_COST))
            for r, c in zip(rows.view(heads, height, height), cols.view(heads, width, width))]
        return [
            head._replace(**{
                name: t.to(device, dtype).contiguous() for name, t in head._asdict().items() if t is not None})
            for head in found]


def work_out(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        tolerance: float,
        dim: int,
        dtype: torch.dtype,
) -> List[Head]:
    """Plan the cheapest way for heads with these probabilities, factors rounded from float64 to a dtype.

    Args:
        row_probs: Probabilities of key rows, shape (heads, H, H).
        col_probs: Probabilities of key columns, shape (heads, W, W).
        tolerance: Operator norm that what is left out of a head's map may have.
        dim: Channels.
        dtype: What the factors are for.
    """
    # on the CPU: not every device has float64
    probs = torch.cat([p.detach().cpu().double().flatten() for p in (row_probs, col_probs)])
    shape = len(row_probs), row_probs.shape[1], col_probs.shape[1]
    return remembered(probs.numpy().tobytes(), shape, tolerance, dim, dtype, row_probs.device)


def low_rank_attention(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tolerance: float,
) -> torch.Tensor:
    """`attend_by_factors` with each map to a tolerance in operator norm, out of autograd's sight."""
    dtype = autocast_dtype(x)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    heads = work_out(row_probs, col_probs, tolerance, x.shape[3], dtype)
    values = weight.unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()
    images = max(1, CPU_BYTES // max(1, len(heads) * x[:1].numel() * x.element_size()))
    return torch.cat([attend_group(group, heads, values, bias) for group in x.split(images)])


def attend_group(
        x: torch.Tensor,
        heads: List[Head],
        weight: torch.Tensor,
        bias: torch.Tensor,
) -> torch.Tensor:
    """Output of a layer for a group of images, which lie beside the channels as in `positions`.

    Args:
        x: Input, shape (B, H, W, C).
        heads: Factors of each head.
        weight: Value weights, shape (heads, C, C), contiguous, output before input.
        bias: Shape (C,).

    Returns:
        Output, shape (B, H, W, C), not contiguous.
    """
    batch, height, width, dim = x.shape
    n = batch * dim
    pixels = x.permute(1, 2, 0, 3).contiguous().flatten(1)
    query_cols = torch.cat([head.query_cols for head in heads], dim=1)
    met, start = x.new_empty(height, query_cols.shape[1], n), 0
    for head, values in zip(heads, weight):
        kept = pixels
        if head.key_rows is not None and head.key_cols is not None:
            kept = (head.key_rows @ pixels).view(-1, width, n)
            kept = torch.bmm(head.key_cols.expand(len(kept), -1, -1), kept)
        value = (kept.view(-1, dim) @ values.T).view(head.query_rows.shape[1], -1)
        torch.mm(head.query_rows, value, out=met[:, start:start + head.query_cols.shape[1]].flatten(1))
        start += head.query_cols.shape[1]
    total = torch.baddbmm(bias.repeat(batch).expand(height, width, n), query_cols.expand(height, -1, -1), met)
    return total.unflatten(2, (batch, dim)).permute(2, 0, 1, 3)
