"""The net that a command was asked for."""
import difflib
from pathlib import Path
from typing import Optional

import timm
import torch
import torch.nn as nn

from timm_selfconv import fuse, hub
from timm_selfconv.models._weights import require_hub

__all__ = ['create_model', 'fused']


def fused(model: nn.Module, tolerance: Optional[float]) -> nn.Module:
    """A net fused within a tolerance, to rounding for 0, or as it is for None."""
    return model if tolerance is None else fuse(model, tolerance or None)


def create_model(
        name: str,
        checkpoint: Optional[str] = None,
        untrained: bool = False,
        seed: int = 42,
) -> nn.Module:
    """A net with its own weights, those of a checkpoint, or as it was before any training.

    Args:
        name: A name of timm's registry (the zoo's are in it), 'local-dir:FOLDER' or 'hf-hub:ORG/NAME'.
        checkpoint: Weights in the place of its own: a file, or a folder of safetensors shards.
        untrained: Leave it as it is initialised.
        seed: Of that initialisation.

    Raises:
        ValueError: If there is no such net or checkpoint, or its weights can't be loaded or aren't finite.
    """
    if ':' not in name and not timm.is_model(name):
        near = ', '.join(difflib.get_close_matches(name, timm.list_models()))
        raise ValueError(f'model={name!r}: there is no such model; ' + (
            f'did you mean {near}?' if near else 'timm-selfconv list shows those of the zoo'))
    if untrained:
        torch.manual_seed(seed)
    if checkpoint is not None and not (checkpoint and (Path(checkpoint).is_file() or Path(checkpoint).is_dir())):
        raise ValueError(f'checkpoint={checkpoint!r}: needs a weight file, or a folder of shards')
    try:
        if name.startswith(('hf-hub:', 'hf_hub:')):
            require_hub()
        if checkpoint and Path(checkpoint).is_dir():
            model = timm.create_model(name)
            hub.load_shards(model, checkpoint)
        else:
            overlay = dict(file=checkpoint) if checkpoint else None
            model = timm.create_model(name, pretrained=not untrained, pretrained_cfg_overlay=overlay)
    except Exception as e:  # a file that is broken raises anything, a pickle above all
        if checkpoint is None and ':' not in name:  # its own weights, or none: anything but this is a bug
            if isinstance(e, RuntimeError):
                raise ValueError(str(e)) from e
            raise
        source = f'model={name!r}' if checkpoint is None else f'checkpoint={checkpoint!r}'
        run = Path(checkpoint or '').parent
        instead = f', take local-dir:{run} instead' if checkpoint and (run / 'config.json').is_file() else ''
        raise ValueError(f'{source}: cannot be loaded{instead} ({e or type(e).__name__})') from e
    for key, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f'model={name!r}: its weights hold values in {key} that are not finite')
    return model
