"""Declaration of commands, shared arguments, and the net that they name."""
import difflib
import json
import os
from argparse import ArgumentTypeError, Namespace
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import timm
import torch
from timm.models import load_state_dict

from timm_selfconv.files import check_new
from timm_selfconv.models import zoo_names
from timm_selfconv.weights import net_caption
from timm_selfconv.weights.loading import hub_errors

Argument = Tuple[Tuple[str, ...], Dict[str, Any]]
Command = Callable[[Namespace], None]
COMMANDS: Dict[str, Dict[str, Tuple[Command, Tuple[Union[Argument, List[Argument]], ...]]]] = {}  # by group and name


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def command(group: str, *arguments: Union[Argument, List[Argument]]) -> Callable[[Command], Command]:
    """Register a function as a command with its name. Arguments in a list exclude each other."""
    def register(function: Command) -> Command:
        COMMANDS.setdefault(group, {})[function.__name__.rstrip('_')] = function, arguments
        return function

    return register


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f'{text!r}: needs a whole number above 0')
    return int(text)


def new_path(text: str) -> Path:
    check_new(text)
    return Path(text)


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text}: {'needs a file' if Path(text).exists() else 'no such file'}")
    return Path(text)


def model_name(text: str) -> str:
    if text.startswith('local-dir:'):
        existing_file(os.path.join(text.partition(':')[2], 'config.json'))
    elif ':' not in text and not timm.is_model(text):
        near = ', '.join(difflib.get_close_matches(text, timm.list_models()))
        raise ArgumentTypeError(f'{text!r}: no such model; ' + (
            f'did you mean {near}?' if near else 'timm-selfconv list shows the zoo'))
    return text


MODEL = argument('model', type=model_name, metavar='MODEL', help=(
    'name of a timm model (timm-selfconv list shows the zoo), local-dir:FOLDER or hf-hub:OWNER/NAME'))
CHECKPOINT = argument('--checkpoint', type=existing_file, metavar='FILE', help='load weights from this file instead')
NET = (  # arguments of load_model
    MODEL, [CHECKPOINT, argument('--untrained', action='store_true', help='use random weights')])
INPUT_KEY = argument('--input-key', default='img', metavar='KEY', help='column of the images (default: img)')
SPLIT = argument('--split', default='test', help='split of the dataset (default: test)')
COUNT = argument('--count', type=natural, default=100, metavar='N', help='number of images (default: 100)')
DEVICE = argument('--device', help='torch device (default: cuda if available, else cpu)')
JSON = argument('--json', action='store_true', help='print JSON instead of text')


def images(text: str, nargs: str = '+', name: str = 'images') -> Argument:
    return argument(name, nargs=nargs, type=existing_file, default=[], metavar='IMAGE', help=text)


def output(metavar: str, text: str, kind: Any = new_path) -> Argument:
    return argument('--output', required=True, type=kind, metavar=metavar, help=text)


def show(args: Namespace, values: Any, text: str) -> None:
    print(json.dumps(values, indent=2, default=asdict) if args.json else text)


def load_model(args: Namespace) -> Any:
    return create_model(args.model, args.checkpoint, args.untrained)


def caption(args: Namespace) -> str:
    return net_caption(args.model, args.checkpoint and str(args.checkpoint), args.untrained)


def common_prefix(checkpoint: Path) -> str:
    """The common first word of all keys of a state dict, with its dot, or an empty text."""
    with suppress(Exception):  # the caller reports an error
        first, *others = {key.partition('.')[0] for key in load_state_dict(str(checkpoint))}
        return '' if others else f'{first}.'
    return ''


def create_model(name: str, checkpoint: Optional[Path] = None, untrained: Optional[bool] = None) -> Any:
    """A net with pretrained weights, the weights of a checkpoint, or initialised from a fixed seed.

    Raises:
        ValueError: If the weights cannot be loaded, or are not finite.
    """
    if untrained:
        torch.manual_seed(42)
    try:
        own = name.partition('.')[0] in zoo_names() or ':' in name
        config = None if own or checkpoint or untrained else timm.get_pretrained_cfg(name)
        of_hub = name.startswith(('hf-hub:', 'hf_hub:')) or (config and config.hf_hub_id)
        overlay = dict(file=str(checkpoint)) if checkpoint else None
        with hub_errors(name) if of_hub else nullcontext():
            model = timm.create_model(name, pretrained=not untrained, pretrained_cfg_overlay=overlay)
    except Exception as e:  # a broken file can raise anything
        source, instead = f'model={name!r}', ''
        if checkpoint is not None:
            source, prefix = f"checkpoint='{checkpoint}'", common_prefix(checkpoint)
            if prefix:
                instead = f'; all keys begin with {prefix!r}, as in Lightning checkpoints: remove this prefix'
            elif checkpoint.with_name('config.json').is_file():
                instead = f'; use the model local-dir:{checkpoint.parent}'
        elif ':' not in name:  # other errors are bugs
            if not isinstance(e, (RuntimeError, OSError)):
                raise
            tags = timm.list_models(f'{name.partition(".")[0]}.*', pretrained=True) if '.' in name else [name]
            hint = '' if untrained is None else '; --untrained initialises it'  # None: the command has no such argument
            instead = hint if name in tags else f'; available: {tags}'
        raise ValueError(f'{source}: cannot be loaded{instead} ({e or type(e).__name__})') from e
    for key, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f'model={name!r}: the weights have values in {key} that are not finite')
    return model
