"""Pruning with a fit: the remaining heads get the values that change the layer's output least.

A closed form, the optimal brain surgeon (Hassibi, Stork, NeurIPS 1992, eq. 5) with all values of a head as one weight.
"""
from dataclasses import dataclass
from typing import List, Sequence, Tuple

import torch
import torch.nn as nn
from timm.models._input import update_model_args

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.models import SelfAttentionNet
from .pruning import block_attentions, prune_heads

__all__ = ['HeadMerge', 'merge_heads']

RIDGE = 1e-6  # of the mean variance: similar heads would leave the fit undetermined
IMAGES_AT_ONCE = 8


@dataclass(frozen=True)
class HeadMerge:
    """Outcome of merging the heads of a layer.

    Attributes:
        layer: Layer, counted from 0.
        dropped: Dropped heads, counted from 0, in order.
        error: Standard deviation of the change of the sum of heads, divided by the standard deviation of the sum.
    """
    layer: int
    dropped: Tuple[int, ...]
    error: float


def gathered_moments(
        model: nn.Module, attn: SelfAttention2d, images: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mean, shape (heads dim,), and covariance, in float64, of the inputs of a layer's values."""
    count, total, products = 0, torch.zeros(()), torch.zeros(())

    def add(module: nn.Module, inputs: Tuple[torch.Tensor]) -> None:
        nonlocal count, total, products
        gathered = inputs[0].flatten(0, -2).double()
        count, total = count + len(gathered), total + gathered.sum(dim=0)
        products = products + gathered.T @ gathered

    hook = attn.value.register_forward_pre_hook(add)
    try:
        with torch.no_grad():
            for batch in images.split(IMAGES_AT_ONCE):
                model(batch)
    finally:
        hook.remove()
    mean = total / count
    return mean, products / count - mean[:, None] * mean


def merge_values(covariance: torch.Tensor, values: torch.Tensor, keep: int) -> Tuple[List[int], torch.Tensor, float]:
    """Drop heads one at a time, with the least loss after a fit of the others.

    Takes the covariance of the inputs, shape (heads dim, heads dim), and values, (heads, dim, out). Returns the dropped
    heads, the values of the others, and the loss: the variance of the change, summed over outputs.
    """
    heads, dim, _ = values.shape
    inverse = torch.linalg.inv(covariance).view(heads, dim, heads, dim)
    left, dropped, loss = list(range(heads)), [], 0.
    while len(left) > keep:
        # the least loss without head i is trace(V_i' C_i V_i), C_i the inverse of block i of the inverse covariance
        pulls = [torch.linalg.solve(inverse[i, :, i], values[i]) for i in range(len(left))]
        losses = torch.stack([(pull * value).sum() for pull, value in zip(pulls, values)])
        i = int(losses.argmin())
        loss += float(losses[i])
        rest = [j for j in range(len(left)) if j != i]
        values = values[rest] - inverse[rest, :, i] @ pulls[i]
        column = inverse[rest][:, :, i].flatten(0, 1)
        inverse = inverse[rest][:, :, rest] - (column @ torch.linalg.solve(inverse[i, :, i], column.T)).view(
            len(rest), dim, len(rest), dim)
        dropped.append(left.pop(i))
    return dropped, values, loss


def merge_heads(
        model: nn.Module, num_heads: Sequence[int], images: torch.Tensor) -> Tuple[SelfAttentionNet, List[HeadMerge]]:
    """Prune heads and fit the values of the others by least squares, layer by layer.

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged.
        num_heads: Number of heads to keep in each layer.
        images: Preprocessed images to fit on, shape (B, in_chans, H, W), with many more queries than a layer has input
            channels in all heads.

    Returns:
        The smaller net, in the same mode and on the same device, and a report for each layer that lost heads.

    Raises:
        ValueError: If it is another kind of net, a number of heads is out of range, or the images leave nothing to fit.
    """
    numbers = [attn.num_heads for attn in block_attentions(model)]
    if (not isinstance(num_heads, Sequence) or len(num_heads) != len(numbers)
            or not all(1 <= keep <= n for keep, n in zip(num_heads, numbers))):
        raise ValueError(f'num_heads={num_heads!r}: needs one number for each layer, from 1 to {tuple(numbers)}')
    if not len(images):
        raise ValueError(f'images={tuple(images.shape)}: needs at least one')
    merged, report = prune_heads(model, {}).eval(), []
    for layer, (attn, keep) in enumerate(zip(block_attentions(merged), num_heads)):
        heads = attn.num_heads
        if keep == heads:
            continue
        mean, covariance = gathered_moments(merged, attn, images)
        weight = attn.value.weight.detach().double()
        variance = float(((weight @ covariance) * weight).sum())
        if not variance > 0:
            raise ValueError(f'images: the inputs of layer {layer} are equal at all pixels, or not finite')
        covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
        dropped, values, loss = merge_values(covariance, weight.T.reshape(heads, attn.dim, -1), keep)
        report.append(HeadMerge(layer, tuple(dropped), (max(loss, 0.) / variance) ** 0.5))

        kept = [head for head in range(heads) if head not in dropped]
        attn.keep_heads(kept)
        merged_weight = values.flatten(0, 1).T
        with torch.no_grad():
            attn.value.weight.copy_(merged_weight)
            attn.value.bias.add_(weight @ mean - merged_weight @ mean.view(heads, -1)[kept].flatten())
    update_model_args(merged, num_heads=merged.num_heads)
    return merged.train(model.training), report
