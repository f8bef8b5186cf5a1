"""Recipes: where they lie, in ``recipes`` beside the package in a checkout, in it where it is installed; what they say.

timm's train.py reads them itself. What stands here of their keys is what :mod:`timm_selfconv.train` makes of them.
"""
import argparse
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

import yaml

__all__ = ['DEFAULTS', 'RECIPES', 'find_recipe', 'read_recipe']

PACKAGE = Path(__file__).resolve().parent
RECIPES = (PACKAGE if (PACKAGE / 'recipes').is_dir() else PACKAGE.parent) / 'recipes'

# what train.py takes where a recipe is silent, of the keys that our trainer honours; a type where that is nothing
KEYS: Dict[str, Any] = dict(
    model=str, model_kwargs={}, initial_checkpoint='', dataset='', input_key='img', target_key='label',
    train_split='train', val_split='validation', device_modules=[], epochs=300, batch_size=128, grad_accum_steps=1,
    opt='sgd', opt_eps=float, opt_betas=list, momentum=0.9, lr=float, weight_decay=2e-5, clip_grad=float,
    sched='cosine', sched_on_updates=False, warmup_epochs=5, warmup_lr=1e-5, warmup_prefix=False, min_lr=0.,
    decay_milestones=[90, 180, 270], decay_rate=0.1, amp=False, amp_dtype='float16', torchcompile=str, val_interval=1,
    model_ema=False, model_ema_decay=0.9998, model_ema_warmup=False, crop_padding=int, img_sizes={},
    scale=[0.08, 1.], ratio=[3 / 4, 4 / 3], train_interpolation='bilinear', hflip=0.5, color_jitter=0.4, reprob=0.,
    mixup=0., cutmix=0., mixup_prob=1., smoothing=0.1, drop=0., drop_path=float, kd_model_name=str,
    kd_distill_type='logit', kd_temperature=4., kd_maps={}, kd_maps_weight=10., distill_loss_weight=float,
    task_loss_weight=float, seed=42, checkpoint_hist=int)
DEFAULTS = {key: None if isinstance(default, type) else default for key, default in KEYS.items()}
CHOICES: Dict[str, Tuple[Any, ...]] = dict(
    amp_dtype=('bfloat16',), color_jitter=(0,), train_interpolation=('bilinear', 'bicubic'), kd_distill_type=('logit',))
POSITIVE = ('epochs', 'batch_size', 'grad_accum_steps', 'val_interval', 'lr', 'kd_temperature')


def find_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: What it is called, without ``.yaml``.

    Raises:
        ValueError: If there is none of that name.
    """
    files = {file.stem: file for file in RECIPES.glob('*.yaml')}
    if name not in files:
        raise ValueError(f"recipe={name!r}: there is none; the package has {', '.join(sorted(files))}")
    return files[name]


def checked(key: str, value: Any) -> Any:
    """A value of a recipe, of its key's type; numbers may be what YAML takes for words, such as 1e-3."""
    kind = KEYS[key] if isinstance(KEYS[key], type) else type(KEYS[key])
    if kind is float and type(value) in (int, str):
        with suppress(ValueError):
            value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)) or (key in POSITIVE and value <= 0):
        needs = {float: 'a number', int: 'a whole number'}.get(kind, kind.__name__)
        raise ValueError(f"{key}={value!r}: needs {needs}{' above 0' if key in POSITIVE else ''}")
    return value


def read_recipe(path: str, overrides: Sequence[str] = ()) -> argparse.Namespace:
    """A recipe with KEY=VALUE replacements, complete, as timm's factories take it.

    Raises:
        ValueError: If there is no such recipe, or it asks for what our trainer does not do.
    """
    file = Path(path) if Path(path).is_file() else find_recipe(path)
    try:
        recipe = yaml.safe_load(file.read_text())
        if not isinstance(recipe, dict):
            raise ValueError(f'recipe={path!r}: needs a line KEY: VALUE for each key')
        for override in overrides:
            key, equals, value = override.partition('=')
            if not equals:
                raise ValueError(f'override={override!r}: needs KEY=VALUE')
            recipe[key] = yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise ValueError(f"recipe={path!r}, overrides={overrides}: needs YAML ({' '.join(str(e).split())})") from e
    recipe = {key: value for key, value in recipe.items() if value is not None}
    unknown = sorted(map(str, set(recipe) - set(KEYS)))
    if unknown:
        raise ValueError(f'recipe={path!r}: timm_selfconv.train does not do {unknown}; {unknown[0]}=null leaves it out')
    args = argparse.Namespace(**{**DEFAULTS, **{key: checked(key, value) for key, value in recipe.items()}})
    for key, choices in CHOICES.items():
        if getattr(args, key) not in choices and (key != 'amp_dtype' or args.amp):
            raise ValueError(
                f"{key}={getattr(args, key)!r}: timm_selfconv.train needs {' or '.join(map(repr, choices))}")
    for key in ('model', 'lr'):
        if getattr(args, key) is None:
            raise ValueError(f'{key}=None: needs a value')
    if not all(type(start) is type(size) is int and start >= 0 < size for start, size in args.img_sizes.items()):
        raise ValueError(f'img_sizes={args.img_sizes!r}: needs a size in pixels by the epoch that it begins with')
    if not all(type(layer) is type(stage) is int and min(layer, stage) >= 0 for layer, stage in args.kd_maps.items()):
        raise ValueError(f"kd_maps={args.kd_maps!r}: needs a teacher's stage by the layer that learns it, both from 0")
    return args
