"""Distillation from a teacher's probabilities and from feature maps of its stages (keys ``kd_*``)."""
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.task import DistillationTeacher

from timm_selfconv.files import as_value_error
from .augment import at_size
from .net import create_optimizer
from .trainer import Training

__all__ = ['Distillation', 'Student', 'logits_and_maps', 'map_loss']


def map_loss(maps: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean squared error between maps of a model and of its teacher (hints; FitNets, Romero et al., 2015).

    Maps of a pair, shapes (B, C, height, width) and (B, C, H, W), are averaged to the coarser grid. Channels of the
    teacher are standardised over the batch.
    """
    losses = []
    for ours, theirs in zip(maps, wanted):
        height, width = map(min, ours.shape[-2:], theirs.shape[-2:])
        ours, theirs = (F.adaptive_avg_pool2d(x.float(), (height, width)) for x in (ours, theirs))
        losses.append(F.mse_loss(ours, F.batch_norm(theirs, None, None, training=True)))
    return torch.stack(losses).mean()


def logits_and_maps(net: Any, x: torch.Tensor, layers: List[int]) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """Return a timm model's logits for images x, shape (B, C, H, W), and its feature maps at some layers, from 0."""
    if not layers:
        return net(x), []
    taken = sorted(set(layers))  # maps come in the net's order, each once
    features, maps = net.forward_intermediates(x, indices=taken)
    return net.forward_head(features), [maps[taken.index(layer)] for layer in layers]


class Student(nn.Module):
    """A model with linear layers that predict maps of the teacher's stages (``pairs``: layer to stage, from 0)."""

    def __init__(self, net: nn.Module, teacher: Optional[nn.Module], pairs: Dict[int, int]):
        super().__init__()
        self.net, self.layers, self.stages = net, list(pairs.keys()), list(pairs.values())
        channels = []
        for role, each, layers in (
                ('the net', net, self.layers), ('its teacher (kd_model_name)', teacher, self.stages)):
            infos = list(getattr(each, 'feature_info', ()))
            if layers and max(layers) >= len(infos):
                raise ValueError(f'layer {max(layers)}: {role} has {len(infos)} layers, counted from 0')
            channels.append([infos[layer]['num_chs'] for layer in layers])
        self.heads = nn.ModuleList([nn.Conv2d(ours, theirs, 1) for ours, theirs in zip(*channels)])

    def no_weight_decay(self) -> Set[str]:
        return {f'net.{name}' for name in getattr(self.net, 'no_weight_decay', set)()}

    def forward(self, x: torch.Tensor) -> Union[torch.Tensor, Tuple[torch.Tensor, List[torch.Tensor]]]:
        """Return logits of images x, shape (B, C, H, W), and with gradients enabled also the predicted maps."""
        if not torch.is_grad_enabled():
            return self.net(x)
        logits, maps = logits_and_maps(self.net, x, self.layers)
        return logits, [head(m) for head, m in zip(self.heads, maps)]


class Distillation(Training):
    """Training with a teacher."""

    def __init__(self, args: Any, *more: Any):
        super().__init__(args, *more)
        self.teacher: Any = None
        if args.kd_model_name is not None:
            with as_value_error(f'kd_model_name={args.kd_model_name!r}'):
                self.teacher = DistillationTeacher(
                    args.kd_model_name, self.model.num_classes, self.model.in_chans, device=self.images.device)
            if self.backend:
                self.teacher.compile(self.backend)
        with as_value_error(f'kd_maps={args.kd_maps}'):
            self.student = Student(self.model, self.teacher and self.teacher.model, args.kd_maps).to(self.images.device)
        self.forward, self.optimizer = self.compiled(self.student), create_optimizer(args, self.student)

    def loss(self, x: torch.Tensor, target: torch.Tensor, size: Optional[int]) -> torch.Tensor:
        args, teacher = self.args, self.teacher
        x, target, smoothing = self.augment.mix(x, target, len(self.history))
        logits, maps = self.forward(at_size(x, size))
        with torch.no_grad():  # the teacher sees the same images at full size
            x = teacher.normalize_input(at_size(x, None), self.augment.mean, self.augment.std)
            wanted, hints = logits_and_maps(teacher.model, x, self.student.stages)
        ours, theirs = ((each.float() / args.kd_temperature).log_softmax(-1) for each in (logits, wanted))
        divergence = args.kd_temperature ** 2 * F.kl_div(ours, theirs, reduction='batchmean', log_target=True)
        task, distill = args.task_loss_weight, args.distill_loss_weight  # None: as timm's tasks
        task, distill = (1. if task is None else task), (1. - (task or 0.) if distill is None else distill)
        loss = task * F.cross_entropy(logits, target, label_smoothing=smoothing) + distill * divergence
        return loss + args.kd_maps_weight * map_loss(maps, hints) if maps else loss

    def load(self, checkpoint: Dict[str, Any]) -> None:
        super().load(checkpoint)
        self.student.heads.load_state_dict(checkpoint.get('kd_heads', {}))

    def checkpoint(self) -> Dict[str, Any]:
        return dict(super().checkpoint(), kd_heads=self.student.heads.state_dict())
