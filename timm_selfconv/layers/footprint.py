"""Windows (footprints) around each query, and their sums weighted by channel: pure functions."""
from typing import Any, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F

from timm.layers import register_notrace_function

from .kernels.kernel import gradients_of_operators, mapped, needs_plain_ops

__all__ = ['aggregate', 'footprint']


def windows(x: torch.Tensor, kernel_size: int, stride: int, dilation: int) -> List[torch.Tensor]:
    """Views of x, shape (..., H, W), of equal shape: one per offset of a kernel that stays inside, row by row."""
    reach = dilation * (kernel_size - 1)
    rows, cols = x.shape[-2] - reach, x.shape[-1] - reach
    views: List[torch.Tensor] = []
    for i in range(kernel_size):
        for j in range(kernel_size):
            top, left = i * dilation, j * dilation
            views.append(x[..., top:top + rows:stride, left:left + cols:stride])
    return views


def reflected_margin(x: torch.Tensor, kernel_size: int, dilation: int) -> int:
    """Pixels that a footprint reaches beyond x, shape (..., H, W), or a ValueError if that can't be reflected."""
    margin = dilation * (kernel_size // 2)
    if min(x.shape[-2], x.shape[-1]) <= margin:
        raise ValueError(f'x of shape {list(x.shape)}: needs a height and width of at least {margin + 1}')
    return margin


def reflected(x: torch.Tensor, kernel_size: int, dilation: int) -> torch.Tensor:
    """x, shape (B, C, H, W), and around it the reflected pixels that footprints reach."""
    margin = reflected_margin(x, kernel_size, dilation)
    if margin > 0:  # autocast pads in float32, in which all that comes of it would stay
        x = F.pad(x, (margin, margin, margin, margin), mode='reflect').to(x.dtype)
    return x


def footprint(x: torch.Tensor, kernel_size: int, stride: int = 1, dilation: int = 1) -> List[torch.Tensor]:
    """Pixels in each query's footprint, border pixels reflected.

    Queries sit at every stride-th row and column, the first ones included, each in the middle of its own footprint.

    Args:
        x: Pixels, shape (B, C, H, W).
        kernel_size: Side of the footprint, odd.
        stride: Pixels from one query to the next.
        dilation: Pixels from one pixel of a footprint to the next.

    Returns:
        One tensor per offset, row by row, shape (B, C, ceil(H / stride), ceil(W / stride)) each.

    Raises:
        ValueError: If the footprint reaches farther than the image can be reflected.
    """
    return windows(reflected(x, kernel_size, dilation), kernel_size, stride, dilation)


def weighted_sum(
        value: torch.Tensor,
        weights: torch.Tensor,
        kernel_size: int,
        stride: int,
        dilation: int,
) -> torch.Tensor:
    """:func:`aggregate`, operator by operator."""
    # long rows of one channel: a footprint's shift then moves whole rows, whatever the memory format around
    value, weights = reflected(value.contiguous(), kernel_size, dilation), weights.contiguous()
    out = torch.zeros(0)
    for i, shifted in enumerate(windows(value.unflatten(1, [-1, weights.shape[2]]), kernel_size, stride, dilation)):
        out = weights[:, i, None] * shifted if i == 0 else torch.addcmul(out, weights[:, i, None], shifted)
    return out.flatten(1, 2)


def memory_order(x: torch.Tensor) -> List[int]:
    """Dimensions but the first one, shape (B, ...), from the outermost in memory to the innermost."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def images_last(x: torch.Tensor) -> torch.Tensor:
    """x, shape (B, ...), with all images' same pixel side by side in memory: even a small grid has long runs then."""
    order = memory_order(x)
    rows = x.permute(0, *order).flatten(1).t().contiguous()
    return rows.unflatten(0, [x.shape[i] for i in order]).permute(-1, *(order.index(i) for i in range(1, x.dim())))


def write_images_first(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy x to out, shape (B, ...) both, image by image in the memory of out."""
    order = memory_order(out)  # a transposed matrix: torch copies those in blocks
    out.permute(0, *order).flatten(1).copy_(x.permute(*order, 0).flatten(0, -2).t())


def reflect_border(x: torch.Tensor, margin: int) -> torch.Tensor:
    """x, shape (B, C, H, W), with its border pixels reflected; images innermost in memory."""
    batch, channels, height, width = x.shape
    out = x.new_empty(height + 2 * margin, width + 2 * margin, channels, batch).permute(3, 2, 0, 1)
    out[:, :, margin:margin + height, margin:margin + width] = x
    for dim, size in ((2, height), (3, width)):
        for j in range(1, margin + 1):
            out.select(dim, margin - j).copy_(out.select(dim, margin + j))
            out.select(dim, margin + size - 1 + j).copy_(out.select(dim, margin + size - 1 - j))
    return out


def fold_border(x: torch.Tensor, margin: int) -> torch.Tensor:
    """Add to each pixel, in place, what its reflections got: the transpose of :func:`reflect_border`."""
    for dim in (3, 2):
        size = x.shape[dim] - 2 * margin
        for j in range(1, margin + 1):
            x.select(dim, margin + j).add_(x.select(dim, margin - j))
            x.select(dim, margin + size - 1 - j).add_(x.select(dim, margin + size - 1 + j))
        x = x.narrow(dim, margin, size)
    return x


class WeightedSum(torch.autograd.Function):
    """:func:`weighted_sum`, on a CPU a group of images at a time, all of it in the cache."""
    GROUP_BYTES = 128  # of the images side by side: what vector units take in one step

    @classmethod
    def groups(cls, *tensors: torch.Tensor) -> Iterator[Tuple[torch.Tensor, ...]]:
        """A few images of all tensors, shape (B, ...) each; all of them where launches cost more than the cache."""
        x = tensors[0]
        size = cls.GROUP_BYTES // x.element_size() if x.device.type == 'cpu' else max(1, len(x))
        return zip(*(x.split(size) for x in tensors))

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weights: torch.Tensor, *sizes: int) -> torch.Tensor:
        ctx.save_for_backward(value, weights)
        ctx.sizes = sizes
        margin, (maps, height, width) = reflected_margin(value, sizes[0], sizes[2]), weights.shape[2:]
        out = value.new_empty(len(value), height, width, value.shape[1]).permute(0, 3, 1, 2)
        for v, w, y in WeightedSum.groups(value, weights, out):
            v = reflect_border(images_last(v), margin).unflatten(1, (-1, maps))
            w = images_last(w)
            total = v.new_empty(height, width, *v.shape[1:3], len(v)).permute(4, 2, 3, 0, 1)
            for i, shifted in enumerate(windows(v, *sizes)):
                torch.mul(w[:, i, None], shifted, out=total) if i == 0 else total.addcmul_(w[:, i, None], shifted)
            write_images_first(total.flatten(1, 2), y)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        value, weights = ctx.saved_tensors
        if torch.is_grad_enabled() or needs_plain_ops(grad) or mapped(grad):
            found = gradients_of_operators(
                lambda value, weights: weighted_sum(value, weights, *ctx.sizes), grad, ctx.needs_input_grad[:2],
                ctx.saved_tensors)
            return *found, None, None, None
        margin, maps = reflected_margin(value, ctx.sizes[0], ctx.sizes[2]), weights.shape[2]
        grad_value, grad_weights = torch.empty_like(value), torch.empty_like(weights)
        for v, w, g, gv, gw in WeightedSum.groups(value, weights, grad, grad_value, grad_weights):
            v = reflect_border(images_last(v), margin)
            w, g = images_last(w), images_last(g).unflatten(1, (-1, maps))
            to_v, to_w, product = torch.zeros_like(v), torch.empty_like(w), torch.empty_like(g)
            shifts = zip(*(windows(x.unflatten(1, (-1, maps)), *ctx.sizes) for x in (v, to_v)))
            for i, (shifted, to_shifted) in enumerate(shifts):
                to_shifted.addcmul_(w[:, i, None], g)
                torch.sum(torch.mul(g, shifted, out=product), 1, out=to_w[:, i])
            write_images_first(fold_border(to_v, margin), gv)
            write_images_first(to_w, gw)
        return grad_value, grad_weights, None, None, None


@torch.fx.wrap
@register_notrace_function
def aggregate(
        value: torch.Tensor,
        weights: torch.Tensor,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
) -> torch.Tensor:
    """Sum the values of each query's footprint with weights of its own for every channel.

    Args:
        value: Values, shape (B, C, H, W).
        weights: Weights, shape (B, kernel_size ^ 2, maps, ceil(H / stride), ceil(W / stride)), offsets row by row.
            Channel j uses map ``j mod maps``.
        kernel_size, stride, dilation: See :func:`footprint`.

    Returns:
        Sums, shape (B, C, ceil(H / stride), ceil(W / stride)).
    """
    weights = weights.to(value.dtype)
    if not torch.jit.is_scripting():
        if not needs_plain_ops(value):
            # fewer images make no long runs, and the rows of a larger grid are long themselves
            short = value.device.type == 'cpu' and value.shape[3] * value.element_size() < 64
            if torch.is_grad_enabled() or (value.shape[0] >= 16 and short):
                return WeightedSum.apply(value, weights, kernel_size, stride, dilation)
    return weighted_sum(value, weights, kernel_size, stride, dilation)
