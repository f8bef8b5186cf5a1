"""Attention to keys whose scores are content, a row part and a column part, without a tensor of all scores.

On a CPU by explicit maps of a group of images or of rows of queries, which stays in the cache; the backward pass makes
them again from what came in. Elsewhere by torch's fused attention: row and column scores are more channels of the
queries, which one-hot rows and columns of the keys pick, so that the kernel needs no bias.
"""
from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

from .kernel import Kernel, kernel_dtype

__all__ = ['attend_to_keys', 'fused_attention', 'key_attention', 'pixel_attention']


def probabilities(
        query: torch.Tensor,
        key: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Softmax of content, row and column scores, at least float32, shape (B, heads, Q W, N); see `key_attention`."""
    scores = query.flatten(2, 3) @ key.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rows is not None and cols is not None:
        scores = scores.unflatten(3, [rows.shape[-1], cols.shape[-1]]).unflatten(2, query.shape[2:4])
        scores = scores + rows[..., :, None]  # no more than two of this size are held at a time
        scores = (scores + cols[..., None, :]).flatten(4).flatten(2, 3)
    return scores.softmax(dim=-1)


def attend_to_keys(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> torch.Tensor:
    """Values gathered by explicit maps; see `key_attention`."""
    gathered = probabilities(query, key, rows, cols).to(value.dtype) @ value
    return gathered.unflatten(2, query.shape[2:4]).permute(0, 2, 3, 1, 4)


def gradients(
        needs: Sequence[bool],
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients of :func:`attend_to_keys`, where needed, from its result's, shape (B, Q, W, heads, channels).

    Softmax's, p (g - sum p g), is formed in place of g; its sum over key columns is that of row scores, over key rows
    that of column scores.
    """
    probs = probabilities(query, key, rows, cols)
    back = grad.permute(0, 3, 1, 2, 4).flatten(2, 3)
    of_value = (probs.to(back.dtype).transpose(-2, -1) @ back).sum_to_size(value.shape) if needs[2] else None
    of_scores = (back @ value.transpose(-2, -1)).to(probs.dtype)
    of_scores.sub_((probs * of_scores).sum(-1, keepdim=True)).mul_(probs)
    of_rows = of_cols = None
    if rows is not None and cols is not None:
        grid = of_scores.view(*query.shape[:4], rows.shape[-1], cols.shape[-1])
        of_rows = grid.sum(-1).sum_to_size(rows.shape) if needs[3] else None
        of_cols = grid.sum(-2).sum_to_size(cols.shape) if needs[4] else None
    of_scores = of_scores.to(key.dtype)
    of_query = (of_scores @ key).view(query.shape) if needs[0] else None
    of_key = of_scores.transpose(-2, -1) @ query.flatten(2, 3) if needs[1] else None
    return of_query, of_key, of_value, of_rows, of_cols


by_keys = Kernel(
    'keys', attend_to_keys, attend_to_keys, gradients,
    axes=((0, 2), (0, None), (0, None), (0, 2), (0, 2)), out_axes=(0, 1))


def fused_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """Values gathered by torch's fused attention, its probabilities dropped at a rate; see `key_attention`."""
    shape, channels, value = query.shape[:4], value.shape[3], value.expand(-1, query.shape[1], -1, -1)
    if rows is not None and cols is not None:
        height, width = rows.shape[-1], cols.shape[-1]
        lowest = 0.25 * torch.finfo(query.dtype).min  # infinity times 0 is no number
        scores = [t.clamp(min=lowest).to(query.dtype).expand(*shape, -1) for t in (rows, cols)]
        eyes = [torch.eye(n, device=key.device, dtype=key.dtype) for n in (height, width)]
        places = torch.cat([eyes[0].repeat_interleave(width, 0), eyes[1].repeat(height, 1)], dim=1)
        padding = -(query.shape[4] + height + width) % 8  # fused kernels ask for a multiple of 8
        query = F.pad(torch.cat([query, *scores], dim=-1), (0, padding))
        key = F.pad(torch.cat([key, places.expand(*key.shape[:2], -1, -1)], dim=-1), (0, padding))
        value = F.pad(value, (0, query.shape[4] - channels))  # the fastest ones take one width
    out = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, dropout_p=dropout_p, scale=1.)
    return out[..., :channels].unflatten(2, shape[2:]).permute(0, 2, 3, 1, 4)


@torch.fx.wrap
@register_notrace_function
def key_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """Values gathered by the softmax of content, row and column scores, of which no tensor is kept.

    Args:
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, dim).
        key: Keys, shape (B, heads, N, dim).
        value: Values, shape (B, heads or 1, N, channels); they take the queries' dtype.
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), N = H W, the largest of each query 0; or None.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), with row scores.
        dropout_p: Rate at which probabilities are dropped, where the device's kernels can.

    Returns:
        Shape (B, Q, W, heads, channels).
    """
    value = value.to(query.dtype)
    if rows is not None and cols is not None:  # of one, the largest would swallow the other's, and half precision both
        rows, cols = rows - rows.detach().amax(-1, keepdim=True), cols - cols.detach().amax(-1, keepdim=True)
    if not torch.jit.is_scripting():  # a condition of its own, for what is in it is not compiled then
        if kernel_dtype(query) is not None:
            few = 4 * key.shape[2] <= key.shape[3]  # all probabilities are small beside queries and keys, which stay
            if query.device.type == 'cpu' and not (few and torch.is_grad_enabled()):
                batch, heads, queries, width, _ = query.shape
                scores = 8 * heads * width * key.shape[2]  # bytes of a row's in float32, and of their gradient
                shape = batch, queries, width, heads, value.shape[3]
                return by_keys(shape, scores, query, key, value, rows, cols)
            if query.device.type != 'cpu':
                return fused_attention(query, key, value, rows, cols, dropout_p)
    return attend_to_keys(query, key, value, rows, cols)


def pixel_attention(
        x: torch.Tensor,
        pixels: torch.Tensor,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        key_weight: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """As :func:`key_attention`, keys being pixels: ``(x_q Wq) (x_k Wk)'`` is ``(x_q (Wq Wk')) x_k``.

    Heads are as wide as the layer, so this is one map of a pixel, not two. All heads share such keys: the queries of a
    row are those of all its pixels' heads.

    Args:
        x: Pixels that queries are made of, Q rows of them, shape (B, Q, W, dim).
        pixels: Pixels that are the keys, shape (B, H, W, dim).
        value: Their values, shape (B, H, W, channels).
        weight: Scaled query maps, shape (heads, dim, dim), output before input.
        bias: What is added to their queries, shape (heads, dim).
        key_weight: Key maps, shape (heads, dim, dim), output before input.
        rows: Row scores, shape (B or 1, heads, Q, W or 1, H), or None.
        cols: Column scores, shape (B or 1, heads, Q or 1, W, W), with row scores.
        dropout_p: As there.

    Returns:
        Shape (B, Q, W, heads, channels).
    """
    width, heads = x.shape[2], len(weight)
    if rows is not None and cols is not None:
        rows = rows.permute(0, 2, 3, 1, 4).expand(-1, -1, width, -1, -1).flatten(2, 3)[:, None]
        cols = cols.permute(0, 2, 3, 1, 4).flatten(2, 3)[:, None]
    query = F.linear(
        x, (key_weight.transpose(1, 2) @ weight).flatten(0, 1), (bias[:, None] @ key_weight).flatten())
    gathered = key_attention(
        query.unflatten(3, (heads, -1)).flatten(2, 3)[:, None], pixels.flatten(1, 2)[:, None].to(query.dtype),
        value.flatten(1, 2)[:, None], rows, cols, dropout_p)
    return gathered.unflatten(2, (width, heads)).squeeze(4)
