"""Position-only attention by explicit maps, which all images share.

With ``A``, shape (Q heads, keys), the maps of all heads, a query's side by side, a layer is two products: ``A x`` and
its values. Its gradients are five. All are large and near the top speed even of matrix units (AMX), which the products
of `separable`, over the keys of a row, keep waiting. The batch is walked through in groups of images whose gathered
input, (B, Q, heads, C), stays in the cache; the backward pass gathers it again.
"""
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F

from .linear import autocast_dtype, linear, weight_gradient

__all__ = [
    'gather_by_maps', 'gradients_with_graph', 'map_attention', 'maps_are_faster', 'maps_of_factors', 'without_tiny']

# bytes of what the heads of a group gather: on a CPU a share of the cache, elsewhere of the memory
CPU_BYTES = 16 * 2 ** 20
DEVICE_BYTES = 2 ** 30
# probabilities below it are none
TINY = 1e-30


def maps_are_faster(x: torch.Tensor) -> bool:
    """Whether maps of an input, shape (B, H, W, C), are faster than their factors: on small grids, by matrix units."""
    capabilities: Any = getattr(torch.cpu, 'get_capabilities', dict)  # older torches can't say
    return (
        x.device.type == 'cpu' and x.dtype == torch.bfloat16 and x.shape[1] * x.shape[2] <= x.shape[3]
        and capabilities().get('amx_bf16', False))


def maps_of_factors(row_probs: torch.Tensor, col_probs: torch.Tensor) -> torch.Tensor:
    """``R_h (x) C_h`` of probabilities, shapes (heads, H, H) and (heads, W, W): shape (heads, H W, H W)."""
    return (row_probs[:, :, None, :, None] * col_probs[:, None, :, None, :]).flatten(3).flatten(1, 2)


def gather_by_maps(maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What each head gathers by its map, (heads, Q, H W), of x, (B, H, W, C): shape (B, Q, heads, C), of x's dtype."""
    return torch.einsum('hqk,bkc->bqhc', maps.to(x.dtype), x.flatten(1, 2))


def plain_attention(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """:func:`map_attention` operator by operator."""
    return F.linear(gather_by_maps(maps, x).flatten(2), weight, bias)


def without_tiny(probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Probabilities in a dtype, 0 for those that no sum can tell from it: products of denormal numbers are slow."""
    return F.threshold(probs.to(dtype), TINY, 0.)


def side_by_side(maps: torch.Tensor, x: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """Maps in x's dtype with a query's heads side by side, shape (Q heads, keys), and how many images make a group."""
    budget = CPU_BYTES if x.device.type == 'cpu' else DEVICE_BYTES
    rows = without_tiny(maps, x.dtype).transpose(0, 1).flatten(0, 1)
    return rows, max(1, min(len(x), budget // max(1, len(rows) * x.shape[3] * x.element_size())))


def attend(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """:func:`map_attention` out of autograd's sight."""
    queries, (out_channels, features) = maps.shape[1], weight.shape
    rows, images = side_by_side(maps, x)
    buffer = x.new_empty(images, len(rows), x.shape[3])
    out = x.new_empty(len(x), queries, out_channels)
    for group, result in zip(x.flatten(1, 2).split(images), out.split(images)):
        gathered = torch.bmm(rows.expand(len(group), -1, -1), group, out=buffer[:len(group)])
        result.view(-1, out_channels).copy_(linear(gathered.view(-1, features), weight, bias))
    return out


def gradients(
        grad: torch.Tensor,
        needs: Tuple[bool, ...],
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients of :func:`attend` with respect to its first three arguments, None where not needed.

    Sums over groups are kept in float32 at least.

    Args:
        grad: Gradient of the result, shape (B, Q, out_channels).
        needs: Which of the three are needed.
        maps: The first argument; the others follow.
        x: The second.
        weight: The third.
    """
    (heads, queries, _), (out_channels, features) = maps.shape, weight.shape
    rows, images = side_by_side(maps, x)
    by_key, pixels, values = rows.T.contiguous(), x.flatten(1, 2), weight.T.contiguous()
    sums = torch.promote_types(x.dtype, torch.float32)
    grad_rows, grad_weight = torch.zeros_like(rows, dtype=sums), torch.zeros_like(weight, dtype=sums)
    grad_x = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    buffer, weight_buffer = x.new_empty(images, len(rows), x.shape[3]), torch.empty_like(weight)
    for group, result, back in zip(pixels.split(images), grad_x.split(images), grad.split(images)):
        back = back.reshape(-1, out_channels)
        gathered = buffer[:len(group)]
        if needs[2]:
            torch.bmm(rows.expand(len(group), -1, -1), group, out=gathered)
            grad_weight += weight_gradient(back.T.contiguous(), gathered.view(-1, features), out=weight_buffer)
        if needs[0] or needs[1]:
            gathered = linear(back, values, out=gathered.view(-1, features)).view(gathered.shape)
        if needs[0]:
            grad_rows += (gathered @ group.transpose(1, 2)).sum(0, dtype=sums)
        if needs[1]:
            torch.bmm(by_key.expand(len(group), -1, -1), gathered, out=result)
    return (
        grad_rows.view(queries, heads, -1).transpose(0, 1).to(maps.dtype) if needs[0] else None,
        grad_x.view(x.shape) if needs[1] else None, grad_weight.to(weight.dtype) if needs[2] else None)


def gradients_with_graph(
        function: Callable[..., torch.Tensor],
        ctx: Any,
        grad: torch.Tensor,
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients of a function of what ctx saved, where needed, to be differentiated once more."""
    wanted = [t for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad) if needed]
    found = iter(torch.autograd.grad(function(*ctx.saved_tensors), wanted, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


class MapAttention(torch.autograd.Function):
    """:func:`map_attention` in groups; it keeps its arguments alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.save_for_backward(*args)
        return attend(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, = grads
        if torch.is_grad_enabled():  # who differentiates once more needs a graph of this
            return gradients_with_graph(plain_attention, ctx, grad)
        grad_bias = grad.sum((0, 1)) if ctx.needs_input_grad[3] else None
        return *gradients(grad, ctx.needs_input_grad, *ctx.saved_tensors[:3]), grad_bias


def map_attention(
        maps: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attend with maps that all images share: ``sum_h A_h x W_h + bias``, where nobody looks on (`must_be_plain`).

    What all heads gather is never held for more images than fit into the cache, and not kept. Under autocast it
    computes in autocast's dtype, as a linear map does.

    Args:
        maps: Probabilities, shape (heads, Q, H W), query before key.
        x: Input, shape (B, H, W, C).
        weight: Value weights of all heads, shape (out_channels, heads C).
        bias: Shape (out_channels,), or None.

    Returns:
        Shape (B, Q, out_channels).
    """
    dtype = autocast_dtype(x)
    return MapAttention.apply(maps, x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
