"""Smaller nets: without some heads (appendix E of the paper), with values of a lower rank, or fused for inference."""
import copy
from typing import Dict, Iterable, List, Mapping, Sequence

import torch
import torch.nn as nn
from timm.models import reparameterize_model
from timm.models._input import update_model_args
from timm.models.convit import ConVit

from timm_selfconv.layers import QuadraticEncoding, SelfAttention2d
from timm_selfconv.layers.parameters import ATTENTION, check_dense
from timm_selfconv.models import SelfAttentionNet, fuse_convit

__all__ = ['condition_numbers', 'degenerate_heads', 'fuse', 'precision_eigenvalues', 'prune_heads', 'truncate_values']


def check_net(model: nn.Module) -> SelfAttentionNet:
    if not isinstance(model, SelfAttentionNet) or not all(isinstance(b.attn, SelfAttention2d) for b in model.blocks):
        raise ValueError(f'model={type(model).__name__}: needs a SelfAttentionNet with SelfAttention2d in every layer')
    return model


def precision_eigenvalues(model: nn.Module) -> Dict[int, torch.Tensor]:
    """Eigenvalues of every head's precision ``Sigma^-1``.

    Args:
        model: A net with the position term and the encoding 'quadratic' or 'quadratic_gen'.

    Returns:
        Eigenvalues by layer (from 0), in ascending order, in 1 / pixels^2, float64, shape (heads, 2).

    Raises:
        ValueError: If it is another kind of net.
    """
    eigenvalues = {}
    for layer, block in enumerate(check_net(model).blocks):
        encoding = block.attn.encoding
        if not isinstance(encoding, QuadraticEncoding) or not encoding.position:
            raise ValueError(
                f'model={type(model).__name__}: heads of layer {layer} have no precision; needs the encoding quadratic '
                'or quadratic_gen with the position term, or name the heads to prune')
        precisions = copy.deepcopy(encoding).cpu().double().precisions().detach()  # float32 hides small eigenvalues
        eigenvalues[layer] = torch.linalg.eigvalsh(precisions)
    return eigenvalues


def condition_numbers(eigenvalues: torch.Tensor) -> torch.Tensor:
    """Largest over smallest of eigenvalues in ascending order, shape (heads, 2); infinite for a singular precision."""
    return torch.where(eigenvalues[:, 0] > 0, eigenvalues[:, 1] / eigenvalues[:, 0], torch.inf)


def degenerate_heads(
        model: nn.Module, min_eigenvalue: float = 1e-5, max_condition: float = 1e5) -> Dict[int, List[int]]:
    """Heads that attend to all pixels equally or to a thin stripe (appendix E).

    Args:
        model: A net with the position term and the encoding 'quadratic' or 'quadratic_gen'.
        min_eigenvalue: A head with a smaller largest eigenvalue, in 1 / pixels^2, attends to all pixels equally.
        max_condition: A head with a larger condition number attends to a stripe (paper: 1e5, released code: 1e3).

    Returns:
        Degenerate heads by layer, for :func:`prune_heads`; layers without any are left out.

    Raises:
        ValueError: If it is another kind of net, or a limit is negative.
    """
    for limit, value in (('min_eigenvalue', min_eigenvalue), ('max_condition', max_condition)):
        if not value >= 0:
            raise ValueError(f'{limit}={value!r}: needs a number of at least 0')
    degenerate = {}
    for layer, eigenvalues in precision_eigenvalues(model).items():
        flat_or_stripe = (eigenvalues[:, 1] < min_eigenvalue) | (condition_numbers(eigenvalues) > max_condition)
        if flat_or_stripe.any():
            degenerate[layer] = flat_or_stripe.nonzero().flatten().tolist()
    return degenerate


def prune_heads(model: nn.Module, heads: Mapping[int, Sequence[int]]) -> SelfAttentionNet:
    """Copy a net without some heads and all their parameters.

    The outputs are the same as with the value weights of these heads at zero. timm saves the new ``num_heads``.

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged. Merge its adapters (LoRA) first.
        heads: Heads to drop by layer, both counted from 0.

    Raises:
        ValueError: If a layer or head does not exist, a head is named twice, a layer would have no head left, or part
            of an attention layer is wrapped, parametrized or hooked.
    """
    net = check_net(model)
    if not isinstance(heads, Mapping) or not all(isinstance(dropped, Iterable) for dropped in heads.values()):
        raise ValueError(f'heads={heads!r}: needs a dictionary of heads by layer')
    for layer, dropped in heads.items():
        if layer not in range(len(net.blocks)):
            raise ValueError(f'heads={dict(heads)}: there is no layer {layer}, layers are 0 to {len(net.blocks) - 1}')
        number = net.num_heads[layer]
        if not set(dropped) < set(range(number)) or len(set(dropped)) != len(dropped):
            raise ValueError(
                f'heads={dict(heads)}: layer {layer} needs heads from 0 to {number - 1}, each once, not all')

    check_dense(net, ATTENTION)
    pruned = copy.deepcopy(net)
    for layer, number in enumerate(net.num_heads):
        pruned.blocks[layer].attn.keep_heads([head for head in range(number) if head not in heads.get(layer, ())])
    update_model_args(pruned, num_heads=pruned.num_heads)
    return pruned


@torch.no_grad()
def truncate_values(model: nn.Module, rank: int) -> SelfAttentionNet:
    """Copy a net and replace the value matrix of each head by the nearest matrix of a rank (Eckart, Young, 1936).

    With D_h channels a head has a value matrix ``W_val W_out`` of rank min(D_h, D_out) or less (remark on Theorem 1).

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged. Merge its adapters first.
        rank: Rank of each value matrix, D_h.

    Raises:
        ValueError: If the rank is not from 1 to the channels of a layer, or a value layer is wrapped, parametrized or
            hooked.
    """
    net = check_net(model)
    dim = net.num_features
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= dim:
        raise ValueError(f'rank={rank!r}: needs an integer from 1 to {dim}, the channels of a layer')
    check_dense(net, ('value',))
    truncated = copy.deepcopy(net)
    for attn in (block.attn for block in truncated.blocks):
        weight = attn.value.weight.unflatten(1, (attn.num_heads, dim)).transpose(0, 1)  # (heads, out, in)
        left, singular, right = torch.linalg.svd(weight.cpu().double(), full_matrices=False)
        nearest = left[..., :rank] * singular[:, None, :rank] @ right[:, :rank]
        attn.value.weight.copy_(nearest.transpose(0, 1).flatten(1))
    return truncated


def fuse(model: nn.Module) -> nn.Module:
    """Copy a net for inference; the logits are equal to rounding. See :meth:`SelfAttention2d.fuse`.

    A copy of timm's ConViT keeps its parameters and mode, can be trained, and takes images of any size; see
    :class:`timm_selfconv.models.FusedConVit`.

    Args:
        model: A net or layer with :class:`SelfAttention2d`, or timm's ConViT. It stays unchanged.

    Returns:
        The copy, in eval mode with frozen parameters, except for a ConViT.

    Raises:
        ValueError: If the net has no such layers, or folded layers are adapted or hooked.
    """
    if isinstance(model, ConVit):
        return fuse_convit(copy.deepcopy(model))
    if isinstance(model, SelfAttention2d):
        return model.fuse()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, SelfAttention2d)]
    if not layers:
        raise ValueError(f'model={type(model).__name__}: has no SelfAttention2d layers to fuse, and is no ConViT')
    for name, layer in layers:
        check_dense(layer, ('value', 'proj'), name)
    return reparameterize_model(model).eval().requires_grad_(False)
