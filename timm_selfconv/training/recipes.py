"""Recipes in the format of timm's train.py: their keys, and reading them."""
import argparse
import difflib
import reprlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import yaml

from timm_selfconv.files import as_value_error

__all__ = ['DEFAULTS', 'KEYS', 'RECIPES', 'Key', 'find_recipe', 'read_recipe']

PACKAGE = Path(__file__).resolve().parent.parent
RECIPES = (PACKAGE if (PACKAGE / 'recipes').is_dir() else PACKAGE.parent) / 'recipes'  # installed or checkout
LARGEST = 10 ** 6  # limit of all numbers except seeds


class Key(NamedTuple):
    """A key of a recipe: train.py's default, its type, and accepted values in words and as a test."""
    default: Any
    kind: type
    needs: str
    accepts: Callable[[Any], bool] = lambda value: True


def choice(default: str, *others: str) -> Key:
    choices = default, *others
    return Key(default, str, ' or '.join(map(repr, choices)), choices.__contains__)


def number(default: Optional[float], high: float = LARGEST, above: bool = False, kind: type = float) -> Key:
    needs = f"a {'whole ' if kind is int else ''}number {'above' if above else 'of at least'} 0 and at most {high}"
    return Key(default, kind, needs, lambda value: 0 <= value <= high and not (above and value == 0))


text = partial(Key, kind=str, needs='text')
whole = partial(number, kind=int)
FLAG, LIST = Key(False, bool, 'true or false'), Key([], list, 'a list')
SIZES = Key({}, dict, 'FIRST_EPOCH: PIXELS', lambda sizes: all(
    type(epoch) is type(size) is int and 0 <= epoch and 0 < size <= LARGEST for epoch, size in sizes.items()))
KEYS: Dict[str, Key] = dict(
    model=text(None), model_kwargs=Key({}, dict, 'KEY: VALUE'), pretrained=FLAG, initial_checkpoint=text(''),
    num_classes=whole(None, above=True), img_size=whole(None, above=True),
    dataset=text(''), input_key=text('img'), target_key=text('label'), train_split=text('train'),
    val_split=text('validation'), device_modules=LIST,
    epochs=whole(300, above=True), batch_size=whole(128, above=True), seed=whole(42, high=2 ** 31 - 1),
    opt=text('sgd'), opt_eps=number(None, above=True), opt_betas=Key(None, list, 'a list'), momentum=number(0.9, 1),
    lr=number(None, above=True), position_lr_scale=number(1., above=True), query_key_lr_scale=number(1., above=True),
    weight_decay=number(2e-5), clip_grad=number(None, above=True),
    sched=choice('cosine', 'tanh', 'step', 'multistep', 'poly', 'constant'), sched_on_updates=FLAG,
    warmup_epochs=whole(5), warmup_lr=number(1e-5), warmup_prefix=FLAG, min_lr=number(0.),
    decay_milestones=Key([90, 180, 270], list, 'whole numbers', lambda value: all(type(x) is int for x in value)),
    decay_epochs=number(90., above=True), decay_rate=number(0.1, above=True),
    amp=FLAG, amp_dtype=text('float16'), torchcompile=text(None), grad_checkpointing=FLAG,
    model_ema=FLAG, model_ema_decay=number(0.9998, 1), model_ema_warmup=FLAG,
    val_interval=whole(1, above=True), checkpoint_hist=whole(10, above=True), stem_whitening=number(None, above=True),
    img_sizes=SIZES, hardest_half=SIZES, crop_padding=whole(None),
    crop_padding_mode=choice('constant', 'reflect'), hflip=number(0.5, 1),
    scale=LIST, ratio=LIST, train_interpolation=text(None),  # of train.py, which has no crop_padding
    color_jitter=number(0.4), reprob=number(0., 1), mixup=number(0.), cutmix=number(0.),
    mixup_prob=number(1., 1), mixup_off_epoch=whole(0), smoothing=number(0.1, 1), drop=number(0., 1),
    drop_path=number(None, 1),
)
DEFAULTS = {name: key.default for name, key in KEYS.items()}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe of this package by name; raise a ValueError if there is none."""
    files = {file.stem: file for file in RECIPES.glob('*.yaml')}
    if name not in files:
        raise ValueError(f"recipe={name!r}: no such recipe; this package has {', '.join(sorted(files))}")
    return files[name]


def checked(name: str, value: Any) -> Any:
    """Return a value if its key accepts it; converts numbers that YAML reads as text, such as 1e-3."""
    key = KEYS[name]
    if key.kind is float and type(value) in (int, str):
        with suppress(ValueError, OverflowError):
            value = float(value)
    if type(value) is not key.kind or not key.accepts(value):
        raise ValueError(f'{name}={reprlib.repr(value)}: needs {key.needs}')
    return value


def read_recipe(path: str, overrides: Sequence[str] = ()) -> argparse.Namespace:
    """Read a recipe (a file or a name of this package), with KEY=VALUE replacements and defaults for other keys.

    Raises:
        ValueError: If there is no such recipe, or it has keys or values that the trainer does not support.
    """
    file = Path(path) if Path(path).is_file() else find_recipe(path)
    with as_value_error(f'recipe={path!r}: needs YAML'):
        recipe = yaml.safe_load(file.read_text())
    if not isinstance(recipe, dict):
        raise ValueError(f'recipe={path!r}: needs a line KEY: VALUE for each key')
    for override in overrides:
        name, equals, value = override.partition('=')
        if not equals:
            raise ValueError(f'override={override!r}: needs KEY=VALUE')
        with as_value_error(f'override={reprlib.repr(override)}: needs YAML'):
            recipe[name] = yaml.safe_load(value)
    recipe = {name: value for name, value in recipe.items() if value is not None}
    unknown: List[str] = sorted(map(str, recipe.keys() - KEYS.keys()))
    if unknown:
        near = [f'did you mean {word}? ' for word in difflib.get_close_matches(unknown[0], KEYS, 1)]
        raise ValueError(f"recipe={path!r}: the trainer does not support {unknown}; {''.join(near)}"
                         f'{unknown[0]}=null leaves it out')
    args = argparse.Namespace(**{**DEFAULTS, **{name: checked(name, value) for name, value in recipe.items()}})
    for name in ('model', 'lr', 'crop_padding'):
        if getattr(args, name) is None:
            raise ValueError(f'{name}=None: needs a value')
    # train.py's defaults of these keys are not supported
    for name, accepted in (('amp_dtype', 'bfloat16'), ('color_jitter', 0)):
        if getattr(args, name) != accepted and (name != 'amp_dtype' or args.amp):
            raise ValueError(f'{name}={getattr(args, name)!r}: the trainer needs {accepted!r}')
    return args
