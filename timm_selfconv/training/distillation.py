"""Distillation losses: a teacher's softened probabilities, and the feature maps of its stages."""
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ['Student', 'distillation_loss', 'logits_and_maps', 'map_loss']


def distillation_loss(logits: torch.Tensor, wanted: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divergence of a net's softened probabilities from its teacher's (Hinton, Vinyals, Dean, 2015), as timm's tasks.

    Logits of both, shape (B, classes), are divided by the temperature; the loss is multiplied by its square.
    """
    ours, theirs = ((x.float() / temperature).log_softmax(-1) for x in (logits, wanted))
    return temperature ** 2 * F.kl_div(ours, theirs, reduction='batchmean', log_target=True)


def map_loss(maps: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean squared difference of a net's maps from its teacher's (hints; FitNets, Romero et al., 2015), mean of pairs.

    Maps of a pair, shapes (B, C, height, width) and (B, C, H, W), are averaged to the coarser of their grids. Channels
    of the teacher's are standardised over the batch, so a constant map of zeros has a loss of 1.
    """
    losses = []
    for ours, theirs in zip(maps, wanted):
        height, width = map(min, ours.shape[-2:], theirs.shape[-2:])
        ours, theirs = (F.adaptive_avg_pool2d(x.float(), (height, width)) for x in (ours, theirs))
        losses.append(F.mse_loss(ours, F.batch_norm(theirs, None, None, training=True)))
    return torch.stack(losses).mean()


def logits_and_maps(net: Any, x: torch.Tensor, layers: List[int]) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """Return a timm net's logits for images x, shape (B, C, H, W), and its maps at some of its layers, from 0."""
    if not layers:
        return net(x), []
    taken = sorted(set(layers))  # maps come in the net's order, each once
    features, maps = net.forward_intermediates(x, indices=taken)
    return net.forward_head(features), [maps[taken.index(layer)] for layer in layers]


class Student(nn.Module):
    """A net and the linear layers that turn its maps into its teacher's; they are dropped when it has learned."""

    def __init__(self, net: nn.Module, teacher: Optional[nn.Module], pairs: Dict[int, int]):
        """
        Args:
            net: One of timm's that gives intermediate maps, if there are pairs.
            teacher: Another, or none.
            pairs: Stages of the teacher by the layers of the net that learn them, both from 0.

        Raises:
            ValueError: If one of them has no such layer, or there are pairs and no teacher.
        """
        super().__init__()
        self.net = net
        self.layers, self.stages = list(pairs.keys()), list(pairs.values())
        ours, theirs = (self.channels(*x) for x in (
            ('the net', net, self.layers), ('its teacher (kd_model_name)', teacher, self.stages)))
        self.heads = nn.ModuleList([nn.Conv2d(c, wanted, 1) for c, wanted in zip(ours, theirs)])

    @staticmethod
    def channels(role: str, net: Optional[nn.Module], layers: List[int]) -> List[int]:
        """Number of channels of a net's maps at some of its layers; ``role`` names the net in the error."""
        infos = list(getattr(net, 'feature_info', ()))
        missing = [layer for layer in layers if layer >= len(infos)]
        if missing:
            raise ValueError(f'layer {missing[0]}, counted from 0: {role} has {len(infos)}')
        return [infos[layer]['num_chs'] for layer in layers]

    def no_weight_decay(self) -> Set[str]:
        """Parameters of the net that timm's optimisers don't decay."""
        return {f'net.{name}' for name in getattr(self.net, 'no_weight_decay', set)()}

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Logits of images x, shape (B, C, H, W), and the teacher's maps as predicted from the net's."""
        logits, maps = logits_and_maps(self.net, x, self.layers)
        return logits, [head(m) for head, m in zip(self.heads, maps)]
