"""Position-only attention by whole maps, for processors whose matrix units want long products.

One map ``A``, shape (H W heads, H W), holds the probabilities of all heads, ``R_h (x) C_h``. Two products make a layer,
``(A x) W'``, and five its gradients, each of them near the top speed of a matrix unit (AMX), which a product with a
factor, over the H or W keys of a line, keeps waiting. They cost H W / C as much again as the values do, so small grids
gain. The batch is walked through in groups of images whose gathered input, (B, H W, heads, C), stays in the cache.
"""
from typing import Any, Optional, Tuple

import torch

__all__ = ['attend_by_maps', 'backward_by_maps', 'factors_gradient', 'maps_are_faster', 'whole_maps']

# bytes of what the heads of a group gather
GROUP_BYTES = 16 * 2 ** 20


def maps_are_faster(x: torch.Tensor) -> bool:
    """Whether whole maps of an input, shape (B, H, W, C), are faster than their factors: with AMX, on small grids."""
    capabilities: Any = getattr(torch.cpu, 'get_capabilities', dict)  # older torches can't say
    return (
        x.device.type == 'cpu' and x.dtype == torch.bfloat16 and x.shape[1] * x.shape[2] <= x.shape[3]
        and capabilities().get('amx_bf16', False))


def whole_maps(row_probs: torch.Tensor, col_probs: torch.Tensor) -> torch.Tensor:
    """From (heads, H, H) and (heads, W, W), query before key, to (H W heads, H W), heads of a query side by side."""
    maps = torch.einsum('hik,hjl->ijhkl', row_probs, col_probs)
    return maps.flatten(3).flatten(0, 2)


def factors_gradient(
        grad: torch.Tensor,
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`whole_maps` with respect to its arguments, from that of its result."""
    (heads, height, _), width = row_probs.shape, col_probs.shape[1]
    grad = grad.view(height, width, heads, height, width)
    rows, cols = row_probs.to(grad.dtype), col_probs.to(grad.dtype)
    return torch.einsum('ijhkl,hjl->hik', grad, cols), torch.einsum('ijhkl,hik->hjl', grad, rows)


def images_at_once(maps: torch.Tensor, x: torch.Tensor) -> int:
    """How many of a batch make a group."""
    return max(1, min(len(x), GROUP_BYTES // max(1, len(maps) * x.shape[3] * x.element_size())))


def attend_by_maps(
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Attend with whole maps of row and column probabilities, out of autograd's sight; see `separable_attention`."""
    maps = whole_maps(row_probs, col_probs).to(x.dtype)
    images, pixels = images_at_once(maps, x), x.flatten(1, 2)
    out = x.new_empty(*x.shape[:3], weight.shape[0])
    buffer = x.new_empty(images, len(maps), x.shape[3])
    for group, result in zip(pixels.split(images), out.split(images)):
        gathered = torch.bmm(maps.expand(len(group), -1, -1), group, out=buffer[:len(group)])
        result = result.view(-1, weight.shape[0])
        torch.mm(gathered.view(len(result), weight.shape[1]), weight.T, out=result)
        if bias is not None:
            result += bias
    return out


def backward_by_maps(
        grad: torch.Tensor,
        needs: Tuple[bool, ...],
        row_probs: torch.Tensor,
        col_probs: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients of :func:`attend_by_maps` with respect to its first four arguments, None where not needed.

    Sums over groups are kept in float32 at least.

    Args:
        grad: Gradient of the result, shape (B, H, W, out_channels).
        needs: Which of the four are needed.
        row_probs: The first argument; the others follow.
        col_probs: The second.
        x: The third.
        weight: The fourth.
    """
    maps = whole_maps(row_probs, col_probs).to(x.dtype)
    by_key = maps.T.contiguous()
    images, pixels = images_at_once(maps, x), x.flatten(1, 2)
    sums = torch.promote_types(x.dtype, torch.float32)
    grad_maps, grad_weight = torch.zeros_like(maps, dtype=sums), torch.zeros_like(weight, dtype=sums)
    grad_pixels = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    buffer = x.new_empty(images, len(maps), x.shape[3])
    for group, result, back in zip(pixels.split(images), grad_pixels.split(images), grad.split(images)):
        back = back.reshape(-1, weight.shape[0])
        gathered = buffer[:len(group)]
        if needs[3]:
            torch.bmm(maps.expand(len(group), -1, -1), group, out=gathered)
            grad_weight += back.T.contiguous() @ gathered.view(len(back), weight.shape[1])
        torch.mm(back, weight, out=gathered.view(len(back), weight.shape[1]))
        if needs[0] or needs[1]:
            grad_maps += (gathered @ group.transpose(1, 2)).sum(0, dtype=sums)
        if needs[2]:
            torch.bmm(by_key.expand(len(group), -1, -1), gathered, out=result)
    grad_rows, grad_cols = factors_gradient(grad_maps, row_probs, col_probs)
    return (
        grad_rows.to(row_probs.dtype) if needs[0] else None,
        grad_cols.to(col_probs.dtype) if needs[1] else None,
        grad_pixels.view(x.shape) if needs[2] else None,
        grad_weight.to(weight.dtype) if needs[3] else None,
    )
