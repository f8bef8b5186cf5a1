"""Model of a recipe for the classes of its data, stem whitening, and timm's optimizer."""
import argparse
from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterable, Iterator, List, Set

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data.model_config import resolve_input_data_config
from timm.layers import to_2tuple
from timm.models._input import get_model_input_config
from timm.optim import create_optimizer_v2, muon, optimizer_kwargs, param_groups_weight_decay
from timm.utils import random_seed

from timm_selfconv.data import PictureDataset, label_names, label_numbers, match_classes
from timm_selfconv.files import as_value_error
from timm_selfconv.layers import (
    ConvAttention, LearnedEncoding, QuadraticEncoding, SelfAttention2d, no_weight_decay,
)

__all__ = ['create_net', 'create_optimizer', 'muon_in_float32', 'scaled_groups', 'whiten_stem']

FUSED = ('sgd', 'momentum', 'adam', 'adamw')


def create_net(args: argparse.Namespace, *datasets: PictureDataset) -> Any:
    """Create the model of a recipe and map the labels of its datasets (training images first) to the model's classes.

    Raises:
        ValueError: If there is no such model, or it lacks classes of the datasets.
    """
    random_seed(args.seed)
    with as_value_error(f'model={args.model!r}, initial_checkpoint={args.initial_checkpoint!r}'):
        model: Any = timm.create_model(
            args.model, pretrained=args.pretrained, checkpoint_path=args.initial_checkpoint, drop_rate=args.drop,
            drop_path_rate=args.drop_path, **args.model_kwargs)
        if args.grad_checkpointing:
            model.set_grad_checkpointing()
    if args.num_classes is not None:
        names = tuple(label_numbers(datasets[0]))
        if len(names) not in (0, args.num_classes):
            raise ValueError(f'num_classes={args.num_classes}: the training images have {len(names)} classes, {names}')
        if args.num_classes != model.num_classes or (names and names != label_names(model)):
            model.reset_classifier(args.num_classes)
            model.pretrained_cfg.update(label_names=names or None, tag=None)
    size = args.img_size or args.model_kwargs.get('img_size')
    if size is not None:
        with as_value_error(f'img_size={size}'):
            if hasattr(model, 'set_input_size'):
                model.set_input_size(img_size=size)
            input_size = (get_model_input_config(model)['input_size'][0], *to_2tuple(size))
            resolve_input_data_config(model, dict(input_size=input_size))  # checks the size
        model.pretrained_cfg.update(input_size=input_size, test_input_size=None, pool_size=None)
    for dataset in datasets:
        numbers = match_classes(model, dataset)
        if numbers is not None:
            dataset.target_transform = numbers.__getitem__
    return model


@torch.no_grad()
def whiten_stem(conv: nn.Conv2d, images: torch.Tensor, scale: float, eps: float = 5e-4) -> None:
    """Initialise a first convolution as the whitening transform of patches of images, shape (B, C, H, W).

    The output is centred and has equal variance along all principal components (``eps`` is added to the variances). A
    random semi-orthogonal matrix distributes them over the channels, with a mean standard deviation of ``scale``
    (Jordan, arXiv:2404.00498; there each component has two channels with opposite signs).
    """
    if conv.groups != 1:
        raise ValueError(f'groups={conv.groups}: whitening needs a convolution that is not grouped')
    padding: Any = conv.padding
    patches = F.unfold(images.double(), conv.kernel_size, conv.dilation, padding, conv.stride)
    patches = patches.transpose(0, 1).flatten(1)  # a row per input of the kernel, a column per patch
    variances, components = torch.linalg.eigh(patches.cov())
    whitening = components.T / (variances.clamp(min=0.) + eps).sqrt()[:, None]
    spread = nn.init.orthogonal_(torch.empty(conv.out_channels, len(whitening))).to(whitening)
    weight = scale * max(1., conv.out_channels / len(whitening)) ** 0.5 * spread @ whitening
    conv.weight.copy_(weight.view_as(conv.weight))
    if conv.bias is not None:
        conv.bias.copy_(-weight @ patches.mean(1))


def scaled_groups(
        model: nn.Module, weight_decay: float, position_scale: float = 1., query_key_scale: float = 1.,
) -> List[Dict[str, Any]]:
    """Return timm's parameter groups with multiples of the learning rate for positions and for query and key weights.

    Positions are centres and spreads, learned tables and their keys, and biases of queries that are scored against an
    encoding: such a bias is the position term of equation (8) divided by sqrt(D). Weight decay skips biases, norms, the
    names in the model's ``no_weight_decay``, and centres and spreads of all layers, also in models of other packages.
    """
    scales: Dict[int, float] = {}
    for m in model.modules():
        positions: Iterable[Any] = ()
        if isinstance(m, (LearnedEncoding, QuadraticEncoding)):
            positions = m.parameters()
        elif isinstance(m, ConvAttention):
            positions = m.centers, m.spreads
        elif isinstance(m, SelfAttention2d):
            scales |= {id(linear.weight): query_key_scale for linear in (m.query, m.key) if linear is not None}
            if m.query is not None and getattr(m.encoding, 'content_position', False):
                positions = [m.query.bias]
        scales |= {id(parameter): position_scale for parameter in positions}
    exempt: Set[str] = getattr(model, 'no_weight_decay', set)() | no_weight_decay(model)
    groups = []
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt):
        own = [scales.get(id(p), 1.) for p in group['params']]
        for scale in dict.fromkeys(own):
            parameters = [p for p, wanted in zip(group['params'], own) if wanted == scale]
            groups.append({**group, 'params': parameters, 'lr_scale': scale})
    return groups


def create_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Create timm's optimizer of a recipe; raise a ValueError if it does not exist or needs second derivatives."""
    groups = partial(
        scaled_groups, weight_decay=args.weight_decay, position_scale=args.position_lr_scale,
        query_key_scale=args.query_key_lr_scale)
    fused: Dict[str, Any] = dict(fused=True) if args.opt in FUSED else {}
    with as_value_error(f'opt={args.opt!r}'):
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(args), param_group_fn=groups, **fused)
    if getattr(optimizer, 'is_second_order', False):
        raise ValueError(f'opt={args.opt!r}: needs second derivatives, which the trainer does not compute')
    return optimizer


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """Make timm's Muon orthogonalise updates in float32 instead of bfloat16, which is not an option in timm."""
    half: Any = muon.zeropower_via_newtonschulz
    try:
        muon.zeropower_via_newtonschulz = partial(half, dtype=torch.float32)
        yield
    finally:
        muon.zeropower_via_newtonschulz = half
