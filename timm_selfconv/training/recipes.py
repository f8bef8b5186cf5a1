"""Recipes: where they lie, in ``recipes`` beside the package in a checkout, in it where it is installed; what they say.

timm's train.py reads them itself. The table of keys here is what :mod:`timm_selfconv.train` makes of them.
"""
import argparse
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, cast

import yaml

__all__ = ['DEFAULTS', 'KEYS', 'RECIPES', 'Key', 'find_recipe', 'read_recipe']

PACKAGE = Path(__file__).resolve().parent.parent
RECIPES = (PACKAGE if (PACKAGE / 'recipes').is_dir() else PACKAGE.parent) / 'recipes'


@dataclass(frozen=True)
class Key:
    """A key of a recipe.

    Attributes:
        default: What train.py takes where a recipe is silent, None for nothing.
        kind: Type of the value.
        low: Smallest number that is accepted.
        high: Largest one.
        above: Whether ``low`` itself is too small.
        count: For lists of numbers, how many; they must not fall.
        choices: The only values that are accepted, if not all.
        mapping: For dictionaries of integers, what stands for what.
    """
    default: Any
    kind: type
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    count: int = 0
    choices: Tuple[Any, ...] = ()
    mapping: str = ''

    def number(self, value: Any) -> bool:
        """Return True for a finite number in the range."""
        return type(value) in (int, float) and (self.low < value if self.above else self.low <= value) \
            and value <= self.high and math.isfinite(value)

    def accepts(self, value: Any) -> bool:
        """Return True for a value that a recipe may have."""
        if self.choices:
            return value in self.choices and type(value) is not bool
        if type(value) is not self.kind:
            return False
        value = cast(Any, value)
        if self.kind in (int, float):
            return self.number(value)
        if self.count:
            return len(value) == self.count and all(map(self.number, value)) and value == sorted(value)
        if self.mapping:
            return all(type(k) is int and k >= 0 and type(v) is int and v >= self.low for k, v in value.items())
        return True

    def needs(self) -> str:
        """Describe accepted values, for an error message."""
        if self.choices:
            return ' or '.join(map(repr, self.choices))
        if self.mapping:
            return self.mapping
        what = {float: 'a number', int: 'a whole number', list: f'{self.count or "some"} rising numbers'}
        text = what.get(self.kind, self.kind.__name__)
        if self.low > -math.inf:
            text += f' above {self.low:g}' if self.above else f' of at least {self.low:g}'
        return text + (f' and at most {self.high:g}' if self.high < math.inf else '')


def text(default: Optional[str] = None, *choices: str) -> Key:
    return Key(default, str, choices=choices)


def whole(default: Optional[int], above: bool = False) -> Key:
    return Key(default, int, 0, above=above)


def number(default: Optional[float], low: float = 0., high: float = math.inf, above: bool = False) -> Key:
    return Key(default, float, low, high, above)


KEYS: Dict[str, Key] = dict(
    model=text(), model_kwargs=Key({}, dict), pretrained=Key(False, bool), initial_checkpoint=text(''),
    num_classes=whole(None, above=True), img_size=whole(None, above=True),
    dataset=text(''), input_key=text('img'), target_key=text('label'), train_split=text('train'),
    val_split=text('validation'), device_modules=Key([], list),
    epochs=whole(300, above=True), batch_size=whole(128, above=True), grad_accum_steps=whole(1, above=True),
    seed=whole(42),
    opt=text('sgd'), opt_eps=number(None, above=True), opt_betas=Key(None, list), momentum=number(0.9, 0, 1),
    lr=number(None, above=True), position_lr_scale=number(1., above=True), weight_decay=number(2e-5),
    clip_grad=number(None, above=True),
    sched=text('cosine', 'cosine', 'tanh', 'step', 'multistep', 'poly', 'constant'), sched_on_updates=Key(False, bool),
    warmup_epochs=whole(5), warmup_lr=number(1e-5), warmup_prefix=Key(False, bool), min_lr=number(0.),
    decay_milestones=Key([90, 180, 270], list), decay_rate=number(0.1, above=True),
    amp=Key(False, bool), amp_dtype=text('float16'), torchcompile=text(), val_interval=whole(1, above=True),
    model_ema=Key(False, bool), model_ema_decay=number(0.9998, 0, 1), model_ema_warmup=Key(False, bool),
    checkpoint_hist=whole(10, above=True), stem_whitening=number(None, above=True),
    img_sizes=Key({}, dict, 1, mapping='a size in pixels by the epoch that it begins with'), crop_padding=whole(None),
    scale=Key([0.08, 1.], list, 0, 1, above=True, count=2), ratio=Key([3 / 4, 4 / 3], list, 0, above=True, count=2),
    train_interpolation=text('bilinear', 'bilinear', 'bicubic'), hflip=number(0.5, 0, 1),
    color_jitter=Key(0.4, float, choices=(0,)), reprob=number(0., 0, 1), mixup=number(0.), cutmix=number(0.),
    mixup_prob=number(1., 0, 1), smoothing=number(0.1, 0, 1), drop=number(0., 0, 1), drop_path=number(None, 0, 1),
    kd_model_name=text(), kd_distill_type=text('logit', 'logit'), kd_temperature=number(4., above=True),
    kd_maps=Key({}, dict, 0, mapping="a teacher's stage by the layer that learns it, both from 0"),
    kd_maps_weight=number(10.), distill_loss_weight=number(None), task_loss_weight=number(None),
)
DEFAULTS = {name: key.default for name, key in KEYS.items()}


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


def checked(name: str, value: Any) -> Any:
    """A value of a recipe if its key accepts it; numbers may be what YAML takes for words, such as 1e-3."""
    key = KEYS[name]
    if key.kind is float and type(value) in (int, str):
        with suppress(ValueError):
            value = float(value)
    if not key.accepts(value):
        raise ValueError(f"{name}={value!r}: {'timm_selfconv.train ' if key.choices else ''}needs {key.needs()}")
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
            name, equals, value = override.partition('=')
            if not equals:
                raise ValueError(f'override={override!r}: needs KEY=VALUE')
            recipe[name] = yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise ValueError(f"recipe={path!r}, overrides={overrides}: needs YAML ({' '.join(str(e).split())})") from e
    recipe = {name: value for name, value in recipe.items() if value is not None}
    unknown = sorted(map(str, set(recipe) - set(KEYS)))
    if unknown:
        raise ValueError(f'recipe={path!r}: timm_selfconv.train does not do {unknown}; {unknown[0]}=null leaves it out')
    args = argparse.Namespace(**{**DEFAULTS, **{name: checked(name, value) for name, value in recipe.items()}})
    for name in ('model', 'lr'):
        if getattr(args, name) is None:
            raise ValueError(f'{name}=None: needs a value')
    # where a recipe is silent on these, train.py does what ours does not
    for name, accepted in (('amp_dtype', 'bfloat16'), ('color_jitter', 0)):
        if getattr(args, name) != accepted and (name != 'amp_dtype' or args.amp):
            raise ValueError(f'{name}={getattr(args, name)!r}: timm_selfconv.train needs {accepted!r}')
    return args
