"""Arguments that several commands share, checked before torch is imported, and creation of the net they name."""
import difflib
import re
from argparse import ArgumentParser, ArgumentTypeError
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

from timm_selfconv.files import check_new


def natural(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f'{text!r}: needs a whole number above 0')
    return int(text)


def new_path(text: str) -> Path:
    """A path at which nothing exists yet."""
    check_new(text)
    return Path(text)


def picture(text: str) -> Path:
    """A picture file."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f'{text!r}: needs a readable picture file')
    return Path(text)


def checkpoint(text: str) -> str:
    """A weight file."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f'{text!r}: needs a weight file')
    return text


def model_name(text: str) -> str:
    """A name of timm's registry (the zoo's are in it), read in the sources, or a folder's or the Hub's."""
    source, colon, folder = text.partition(':')
    if colon:
        if source == 'local-dir' and not Path(folder, 'config.json').is_file():
            raise ArgumentTypeError(f'{text!r}: cannot be loaded, there is no {Path(folder, "config.json")}')
        return text
    specs = (find_spec('timm'), find_spec('timm_selfconv'))
    folders = [Path(folder, 'models') for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    entry = re.compile(r"^(?:@register_model\s+def |    ')(\w+)", re.MULTILINE)  # the latter: of retired names
    names = {name for folder in folders for file in folder.glob('*.py') for name in entry.findall(file.read_text())}
    if text.partition('.')[0] not in names:
        near = ', '.join(difflib.get_close_matches(text, names))
        raise ArgumentTypeError(f'{text!r}: there is no such model; ' + (
            f'did you mean {near}?' if near else 'timm-selfconv list shows those of the zoo'))
    return text


def add_model(parser: ArgumentParser) -> None:
    """A net and its weights: the arguments of :func:`create_model`."""
    parser.add_argument(
        'model', type=model_name, metavar='MODEL', help="a net of timm's or of timm-selfconv list, or local-dir:FOLDER")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', type=checkpoint, metavar='FILE', help='weights of your own')
    weights.add_argument('--untrained', action='store_true', help='take the net as it is before any training')
    parser.add_argument('--seed', type=int, default=42, help='of --untrained (default: 42)')


def add_fuse(parser: ArgumentParser) -> None:
    """Option to fuse a net, see :func:`fused`."""
    parser.add_argument('--fuse', action='store_true', help='run the net fused for inference')


def add_data(parser: ArgumentParser, split: str = 'test') -> None:
    """Images of a dataset: arguments of :func:`timm_selfconv.data.open_dataset`."""
    parser.add_argument('--data-dir', help='where the files of a named dataset lie')
    parser.add_argument('--split', default=split, help=f'split of the dataset (default: {split})')
    parser.add_argument('--input-key', default='img', help='column of the images (default: img)')


def add_output(parser: ArgumentParser, metavar: str, text: str, kind: Any = new_path) -> None:
    """Path of a result; argparse takes the beginning of an option for it, so ``--out`` is the same."""
    parser.add_argument('--output', required=True, type=kind, metavar=metavar, help=text)


def fused(model: Any, wanted: bool) -> Any:
    """The net, fused for inference if asked for."""
    from timm_selfconv.theory import fuse

    return fuse(model) if wanted else model


def create_model(name: str, checkpoint: Optional[str] = None, untrained: bool = False, seed: int = 42) -> Any:
    """A net with its own weights, those of a checkpoint, or as initialised; ValueError if it can't be had."""
    import timm
    import torch
    from timm_selfconv.models import zoo_names  # registers the nets, too
    from timm_selfconv.weights.loading import hub_errors

    if untrained:
        torch.manual_seed(seed)
    try:
        own = name.partition('.')[0] in zoo_names() or ':' in name
        config = None if own or checkpoint or untrained else timm.get_pretrained_cfg(name)
        of_hub = name.startswith(('hf-hub:', 'hf_hub:')) or (config and config.hf_hub_id)
        overlay = dict(file=checkpoint) if checkpoint else None
        with hub_errors(name) if of_hub else nullcontext():
            model = timm.create_model(name, pretrained=not untrained, pretrained_cfg_overlay=overlay)
    except Exception as e:  # a file that is broken raises anything, a pickle above all
        if checkpoint is None and ':' not in name:  # its own weights, or none: anything but this is a bug
            if isinstance(e, (RuntimeError, OSError)):
                tags = timm.list_models(f'{name.partition(".")[0]}.*', pretrained=True) if '.' in name else [name]
                instead = '--untrained takes it as it is before training' if name in tags else f'there are {tags}'
                raise ValueError(f'model={name!r}: cannot be loaded; {instead} ({e})') from e
            raise
        source = f'model={name!r}' if checkpoint is None else f'checkpoint={checkpoint!r}'
        run = Path(checkpoint or '').parent
        instead = f', take local-dir:{run} instead' if checkpoint and (run / 'config.json').is_file() else ''
        raise ValueError(f'{source}: cannot be loaded{instead} ({e or type(e).__name__})') from e
    for key, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f'model={name!r}: its weights hold values in {key} that are not finite')
    return model
