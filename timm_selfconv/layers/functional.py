"""Attention on a grid of H x W pixels: scores, and three formulas that gather pixels.

Each formula computes ``sum_k softmax_k(A_h[q, k]) x_k`` for every head h and query q (equation 1), with the heads of a
query side by side, so that one Linear maps them to values. Probabilities below 1e-30 become zero, because denormal
numbers are slow and do not change the sum. N = H W pixels, C channels:

- factors: a softmax over rows times a softmax over columns, O(N (H + W) C) per head. For separable scores.
- maps: an explicit map, O(N^2 C) per head, in one large product. For any scores.
- fused: torch's fused attention, O(N^2 C) per head, without a map. For content plus separable position scores.
"""
from typing import Dict, List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch.fx import Proxy

from timm.layers import register_notrace_function

__all__ = [
    'at_least_float32', 'axis_probs', 'dense_scores', 'gather_by_factors', 'gather_by_maps', 'gather_fused',
    'image_chunks', 'maps_of_factors', 'prefers_maps', 'prefers_scores', 'product_dtype', 'rows_at_once', 'traced',
]

# bytes of a chunk of images, on a CPU (a share of its cache) and on other devices
CPU_BYTES, DEVICE_BYTES = 2 ** 24, 2 ** 30
SCORE_BYTES = 2 ** 28  # largest explicit scores
SMALL_GRID = 64  # up to this number of pixels, maps are faster on any device
LARGE_GRID = 1024  # from this number of pixels on, a CPU's fused attention is faster than explicit scores


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32. Position scores need more than 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def traced(x: torch.Tensor) -> bool:
    """Detect tracers, exporters and the meta device, where the operations must not depend on the size of x."""
    return isinstance(x, Proxy) or x.device.type == 'meta' or torch.jit.is_tracing() or torch.compiler.is_exporting()


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: the dtype of autocast, or of x."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def rows_at_once(x: torch.Tensor, maps: int) -> List[Optional[torch.Tensor]]:
    """Split the rows of queries of x, shape (B, H, W, C), into chunks with explicit maps of ``SCORE_BYTES``.

    Return the row indices, or [None] for all rows at once (with gradients or a tracer).
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, Proxy):
        return [None]
    height, width = x.shape[1:3]
    size = max(1, SCORE_BYTES // max(1, 4 * maps * width * height * width))  # no images have no maps
    return [None] if size >= height else list(torch.arange(height, device=x.device).split(size))


def image_chunks(x: torch.Tensor, elements: int) -> Sequence[torch.Tensor]:
    """Split images into chunks that fit the cache of a CPU, or the memory of another device.

    Args:
        x: Images, shape (B, ...).
        elements: Elements of the largest intermediate tensor per image.

    Returns:
        The chunks, or [x] with gradients or a tracer.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or traced(x):
        return [x]
    return x.split(max(1, (CPU_BYTES if x.device.type == 'cpu' else DEVICE_BYTES) // (elements * x.element_size())))


@torch.compiler.assume_constant_result
def has_matrix_units() -> bool:
    """Detect a CPU with AMX, which multiplies bfloat16 matrices."""
    capabilities: Dict[str, bool] = getattr(torch.cpu, 'get_capabilities', dict)()  # older versions of torch lack it
    return capabilities.get('amx_bf16', False)


def prefers_maps(x: torch.Tensor) -> bool:
    """Return True if maps are faster than factors for an input of shape (B, H, W, C).

    Maps need more operations, but in larger products. They are faster on small grids, and also in half precision on
    matrix units (tensor cores, AMX) if the grid has at most as many pixels as the layer has channels.
    """
    if torch.jit.is_scripting():
        return False
    if traced(x):
        return False
    pixels = x.shape[1] * x.shape[2]
    if pixels <= SMALL_GRID:
        return True
    half = product_dtype(x) in (torch.bfloat16, torch.float16)
    return half and pixels <= x.shape[3] and (x.device.type != 'cpu' or has_matrix_units())


def prefers_scores(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return True if explicit scores of queries (B, heads, H, W, D) and keys (B, heads, N, D) beat fused attention.

    They have to fit ``SCORE_BYTES``. On a CPU they are slower on large grids.
    """
    if torch.jit.is_scripting():
        return True
    if traced(query):
        return True
    large = query.device.type == 'cpu' and key.shape[2] >= LARGE_GRID
    return not large and 4 * query.shape[:4].numel() * key.shape[2] <= SCORE_BYTES


@torch.fx.wrap
@register_notrace_function
def axis_probs(scores: torch.Tensor) -> torch.Tensor:
    """Softmax along one axis, shape (heads, queries, keys). Traces hide it from tools that search for maps."""
    return scores.softmax(dim=-1)


@torch.fx.wrap
@register_notrace_function
def gather_by_factors(row_probs: torch.Tensor, col_probs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gather pixels by rows, then by columns: ``(R_h (x) C_h) x``.

    ``softmax(a[k1] + b[k2])`` over all keys of a grid is ``softmax(a)[k1] softmax(b)[k2]``, borders included.

    Args:
        row_probs: Probabilities of key rows, shape (heads, Q1, H), query before key.
        col_probs: Probabilities of key columns, shape (heads, Q2, W).
        x: Input, shape (B, H, W, C).

    Returns:
        Gathered pixels, shape (B, Q1, Q2, heads C), in the dtype of x.
    """
    heads, batch, width = row_probs.shape[0], x.shape[0], x.shape[2]
    rows = F.hardshrink(row_probs, 1e-30).to(x.dtype).transpose(0, 1).flatten(0, 1)
    cols = F.hardshrink(col_probs, 1e-30).to(x.dtype)
    gathered = rows.expand(batch, -1, -1) @ x.flatten(2)  # by rows: (B, Q1 heads, W C)
    gathered = cols @ gathered.unflatten(1, [-1, heads]).unflatten(3, [width, -1])
    return gathered.transpose(2, 3).flatten(3)


@torch.fx.wrap
@register_notrace_function
def maps_of_factors(row_probs: torch.Tensor, col_probs: torch.Tensor) -> torch.Tensor:
    """Multiply the factors of :func:`gather_by_factors` to maps, shape (1, heads, Q1 Q2, H W), query before key."""
    maps = row_probs[:, :, None, :, None] * col_probs[:, None, :, None, :]
    return maps.flatten(3).flatten(1, 2)[None]


@torch.fx.wrap
@register_notrace_function
def gather_by_maps(maps: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
    """Gather pixels by explicit maps: ``A_h x``.

    Args:
        maps: Probabilities, shape (B or 1, heads, Q, H W), query before key.
        x: Input, shape (B, H, W, C).
        width: Number of queries per row.

    Returns:
        Gathered pixels, shape (B, Q / width, width, heads C), in the dtype of x.
    """
    rows = F.hardshrink(maps, 1e-30).to(x.dtype).transpose(1, 2).flatten(1, 2)
    gathered = rows.expand(x.shape[0], -1, -1) @ x.flatten(1, 2)
    return gathered.view(x.shape[0], maps.shape[2] // width, width, maps.shape[1] * x.shape[3])


@torch.fx.wrap
@register_notrace_function
def dense_scores(
        query: Optional[torch.Tensor],
        key: Optional[torch.Tensor],
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        cross: Optional[torch.Tensor],
) -> torch.Tensor:
    """Sum the scores of equation (8), ``query key' + rows + cols + cross``, up to a constant per query.

    Args:
        query: Scaled queries of Q rows of pixels, shape (B, heads, Q, W, D), or None.
        key: Keys, shape (B, heads, H W, D), with queries.
        rows: Scores of key rows, shape (B or 1, heads, Q, W or 1, H), or None.
        cols: Scores of key columns, shape (B or 1, heads, Q or 1, W, W), with row scores.
        cross: Scores that couple both axes, shape (B or 1, heads, Q, W, H, W), with row scores, or None.

    Returns:
        Scores, at least float32, shape (B or 1, heads, Q W, H W), query before key.
    """
    scores: Optional[torch.Tensor] = None
    if rows is not None and cols is not None:
        # with a maximum of 0 per query, sums keep their precision
        rows, cols = rows - rows.detach().amax(-1, keepdim=True), cols - cols.detach().amax(-1, keepdim=True)
        scores = rows[..., :, None] + cols[..., None, :]
        if cross is not None:
            scores = scores + cross
            scores = scores - scores.detach().amax((-2, -1), keepdim=True)
        scores = scores.flatten(4).flatten(2, 3)
    if query is not None and key is not None:
        content = query.flatten(2, 3) @ key.transpose(-2, -1)
        content = content.to(torch.promote_types(content.dtype, torch.float32))
        scores = content if scores is None else content + scores
    assert scores is not None
    return scores


@torch.jit.unused
def gather_fused(
        query: torch.Tensor,
        key: torch.Tensor,
        x: torch.Tensor,
        rows: Optional[torch.Tensor],
        cols: Optional[torch.Tensor],
        dropout_p: float = 0.,
) -> torch.Tensor:
    """Gather pixels by torch's fused attention, without a map.

    Queries get H + W more channels, the row and column scores. Keys get one-hot rows and columns, which select these
    scores in the product. So the kernel needs no bias.

    Args:
        query: Scaled queries, shape (B, heads, H, W, D).
        key: Keys, shape (B, heads, H W, D).
        x: Input, shape (B, H, W, C).
        rows: Scores of key rows, see :func:`dense_scores`, or None.
        cols: Scores of key columns, with row scores.
        dropout_p: Dropout rate of the probabilities.

    Returns:
        Gathered pixels, shape (B, H, W, heads C), in the dtype of the queries.
    """
    shape, (height, width) = query.shape, x.shape[1:3]
    if rows is not None and cols is not None:
        lowest = 0.25 * torch.finfo(query.dtype).min  # -inf * 0 is nan
        rows, cols = (  # as in dense_scores, in the dtype of the queries
            (t - t.detach().amax(-1, keepdim=True)).clamp(min=lowest).to(query.dtype) for t in (rows, cols))
        row, col = (torch.eye(n, device=key.device, dtype=key.dtype) for n in (height, width))
        places = torch.cat([row.repeat_interleave(width, 0), col.repeat(height, 1)], dim=1)
        padding = 0, -(shape[4] + height + width) % 8  # fused kernels need a multiple of 8
        query = torch.cat([query, *(t.expand(*shape[:4], -1) for t in (rows, F.pad(cols, padding)))], dim=-1)
        key = torch.cat([key, F.pad(places, padding).expand(*key.shape[:2], -1, -1)], dim=-1)
    value = F.pad(x.flatten(1, 2).to(query.dtype), (0, max(0, query.shape[4] - x.shape[3])))  # kernels need one width
    value = value[:, None].expand(-1, shape[1], -1, -1)
    out = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, dropout_p=dropout_p, scale=1.)
    return out[..., :x.shape[3]].transpose(1, 2).unflatten(1, shape[2:4]).flatten(3)
