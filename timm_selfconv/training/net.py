"""The net that a recipe trains, for the classes of its data."""
import argparse
from typing import Any

import timm
from timm.data.model_config import resolve_input_data_config
from timm.layers import to_2tuple
from timm.models._input import get_model_input_config
from timm.utils import random_seed

from timm_selfconv.data import label_names, label_numbers, match_classes
from .recipes import as_value_error

__all__ = ['create_net']


def create_net(args: argparse.Namespace, *datasets: Any) -> Any:
    """The net of a recipe, for the classes of datasets, whose labels become the numbers that it gives them.

    Args:
        args: The recipe. Where it has a number of classes that are not the net's own, the classifier is a new one.
        *datasets: To train on first.

    Raises:
        ValueError: If there is no such net, or it lacks classes of the datasets.
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
            raise ValueError(f'num_classes={args.num_classes}: the training images have {len(names)}, {names}')
        if args.num_classes != model.num_classes or (names and names != label_names(model)):
            model.reset_classifier(args.num_classes)
            model.pretrained_cfg.update(label_names=names or None, tag=None)
    size = args.img_size or args.model_kwargs.get('img_size')
    if size is not None:
        with as_value_error(f'img_size={size}'):
            if hasattr(model, 'set_input_size'):
                model.set_input_size(img_size=size)
            input_size = (get_model_input_config(model)['input_size'][0], *to_2tuple(size))
            resolve_input_data_config(model, dict(input_size=input_size))  # refuses what the net does not take
        model.pretrained_cfg.update(input_size=input_size, test_input_size=None, pool_size=None)
    for dataset in datasets:
        numbers = match_classes(model, dataset)
        if numbers is not None:
            dataset.target_transform = numbers.__getitem__
    return model
