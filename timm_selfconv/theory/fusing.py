"""Nets for inference: what does not depend on the image is worked out beforehand, and wide heads run at their rank.

A layer that attends by position alone returns ``P (sum_h (R_h (x) C_h) x W_h + b) + p``, with ``R_h`` over rows and
``C_h`` over columns. Its factors are the same for all images, and ``P W_h`` is one matrix. And a wide head is smooth:
on a grid a Gaussian of standard deviation ``s`` pixels has a rank of about 1.7 / s of an axis' positions at 1e-6. With
``R_h = U_1 V_1`` and ``C_h = U_2 V_2`` of ranks r_1 and r_2

    (R_h (x) C_h) x W_h  =  (U_1 (x) U_2) ((V_1 (x) V_2) x W_h)

has its value product, most of a layer's work, on r_1 r_2 positions instead of H W.
"""
import copy
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.linear import linear
from timm_selfconv.layers.onlookers import traced
from timm_selfconv.layers.kernels.factors import group_size, images_inside

__all__ = ['FusedAttention2d', 'fuse', 'low_rank']

# what a multiply-add along an axis costs, in those of the value product: its sums are short and memory bounds it
AXIS_COST = {torch.float64: 2., torch.float32: 4.}
HALF_AXIS_COST = 8.
GRIDS = 16  # of so many sizes a layer remembers its factors


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
    """How a head of a number of channels runs best: at its rank, or at all positions if that takes less.

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


class FusedAttention2d(nn.Module):
    """A :class:`SelfAttention2d` by position alone, for inference; see :func:`fuse`.

    Attributes:
        encoding: The layer's own.
        weight: ``P W_h``, shape (heads, dim, dim), output before input.
        bias: ``P b + p``, shape (dim,).
        tolerance: See :func:`fuse`.
    """

    def __init__(self, attn: SelfAttention2d, tolerance: Optional[float] = None):
        super().__init__()
        self.encoding = attn.encoding
        self.tolerance = tolerance
        weight, bias = folded(attn)
        weight = weight.unflatten(1, (attn.num_heads, -1)).transpose(0, 1).contiguous()
        self.weight, self.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
        self._heads: Dict[Tuple[int, int, torch.dtype], List[Head]] = {}

    def extra_repr(self) -> str:
        return f'{self.weight.shape[1]}, heads={len(self.weight)}, tolerance={self.tolerance}'

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Forget factors: the encoding is about to be resampled."""
        self._heads.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self._heads.clear()  # of another device or dtype, or rounded from another
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._heads.clear()
        super()._load_from_state_dict(*args, **kwargs)

    @torch.compiler.disable  # ranks depend on data; what is worked out, a compiler sees as inputs
    def work_out(self, height: int, width: int, dtype: torch.dtype) -> List[Head]:
        """The heads on a grid, in float64 before they are rounded to a dtype, and remember them."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            rows, cols, _ = self.encoding(None, height, width)
            # on the CPU: not every device has float64
            probs = (scores.double().cpu().softmax(dim=-1) for scores in (rows[0, :, :, 0], cols[0, :, 0]))
            heads = [
                Head(None, None, r, c) if self.tolerance is None else
                head_factors(r, c, self.tolerance, self.weight.shape[1], AXIS_COST.get(dtype, HALF_AXIS_COST))
                for r, c in zip(*probs)]
            heads = [
                head._replace(**{
                    name: factor.to(self.weight.device, dtype).contiguous()
                    for name, factor in head._asdict().items() if factor is not None})
                for head in heads]
        if len(self._heads) >= GRIDS:
            self._heads.clear()
        self._heads[height, width, dtype] = heads
        return heads

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend; x and the result have shape (B, H, W, dim). Keys are for attention that looks at them."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        heads = self._heads.get((x.shape[1], x.shape[2], dtype))
        if heads is None:
            heads = self.work_out(x.shape[1], x.shape[2], dtype)
        if traced(x):
            return attend(x, heads, weight, bias, len(heads), plain=True)
        images, step = group_size(x, len(heads), x.shape[3])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for i in range(0, len(x), images):
            out[i:i + images] = attend(x[i:i + images], heads, weight, bias, step, plain=False)
        return out


def attend(
        x: torch.Tensor,
        heads: List[Head],
        weight: torch.Tensor,
        bias: torch.Tensor,
        step: int,
        plain: bool,
) -> torch.Tensor:
    """What a layer makes of a group of images, which lie beside the channels as in `layers.kernels.factors`.

    Args:
        x: Input, shape (B, H, W, C).
        heads: Factors of each head.
        weight: Value weights, shape (heads, C, C), output before input.
        bias: Shape (C,).
        step: How many heads are held at a time.
        plain: Whether to do without products into given memory, which autograd does not know.

    Returns:
        Output, shape (B, H, W, C), not contiguous.
    """
    batch, height, width, dim = x.shape
    n = batch * dim
    pixels = images_inside(x).view(height, width * n)
    total = bias.repeat(batch).expand(height, width, n)
    for first in range(0, len(heads), step):
        some = heads[first:first + step]
        query_cols = torch.cat([head.query_cols for head in some], dim=1)
        met, start = x.new_empty(height, query_cols.shape[1], n), 0
        for i, head in enumerate(some, first):
            kept = pixels
            if head.key_rows is not None and head.key_cols is not None:
                kept = (head.key_rows @ pixels).view(-1, width, n)
                kept = torch.bmm(head.key_cols.expand(len(kept), -1, -1), kept)
            value = linear(kept.view(-1, dim), weight[i]).view(head.query_rows.shape[1], -1)
            slot = met[:, start:start + head.query_cols.shape[1]].flatten(1)
            if plain:
                slot.copy_(head.query_rows @ value)
            else:
                torch.mm(head.query_rows, value, out=slot)
            start += head.query_cols.shape[1]
        total = torch.baddbmm(total, query_cols.expand(height, -1, -1), met)
    return total.view(height, width, batch, dim).permute(2, 0, 1, 3)


def folded(attn: SelfAttention2d) -> Tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a layer's value product with its second Linear in them, computed in float64."""
    value, proj = attn.value, attn.proj
    weight, bias = value.weight.detach().cpu().double(), value.bias.detach().cpu().double()
    if isinstance(proj, nn.Linear):
        second = proj.weight.detach().cpu().double()
        weight, bias = second @ weight, second @ bias + proj.bias.detach().cpu().double()
    return weight.to(value.weight), bias.to(value.weight)


def fused_layer(attn: SelfAttention2d, tolerance: Optional[float]) -> nn.Module:
    """A layer as :func:`fuse` leaves it."""
    if attn.separable:
        return FusedAttention2d(attn, tolerance)
    weight, bias = folded(attn)
    attn.value.weight, attn.value.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
    attn.proj = nn.Identity()
    return attn


def fuse(model: nn.Module, tolerance: Optional[float] = None) -> nn.Module:
    """A copy of a net for inference, its logits equal to rounding; with a tolerance faster, and as near as that says.

    In every attention layer the Linear after the value product is folded into it. Layers that attend by position alone
    through row and column factors (quadratic and learned encodings) compute these once for a grid size. The rest stays
    as it is.

    Args:
        model: A net with :class:`SelfAttention2d` layers: any of ours with any encoding and terms, made by
            :mod:`timm_selfconv.theory` or pruned, also one made for features alone. It is left as it is.
        tolerance: What the attention map ``A_h`` of each such head, queries by keys, may lose in operator norm, between
            0 and 1 (the norm of a map is at least 1). So for the hidden states X of an image what head h gathers is off
            by at most ``tolerance ||X||`` and a layer's output by at most ``tolerance ||X|| sum_h ||P W_h||``, in
            Frobenius norms with the operator norms of the weights, and no attention probability by more than the
            tolerance. Heads become low rank where this is faster. Rounding comes on top. None keeps all heads whole.

    Returns:
        The copy, in eval mode, its parameters frozen. It takes any image size that the net takes, moves to any device
        and dtype, and does not train. It runs under `torch.compile`, as one graph if it has run once before.

    Raises:
        ValueError: If the net has no such layers, or the tolerance is out of range.
    """
    if tolerance is not None and (isinstance(tolerance, bool) or not 0. < tolerance < 1.):
        raise ValueError(f'tolerance={tolerance!r}: needs a number between 0 and 1, or None')
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    layers = {m: fused_layer(m, tolerance) for m in fused.modules() if isinstance(m, SelfAttention2d)}
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to fuse')
    for name, module in list(fused.named_modules(remove_duplicate=False)):
        if module in layers and name:
            fused.set_submodule(name, layers[module])
    return layers[fused] if isinstance(fused, SelfAttention2d) else fused
