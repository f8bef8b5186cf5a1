"""Weights: where they are, how they are saved, and the model cards that stand beside them."""
import re
from pathlib import Path
from typing import Dict, List, Optional, Union

import huggingface_hub
import safetensors.torch
import timm.models
import torch
import torch.nn as nn
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import SafetensorError

from timm_selfconv.files import new_folder, replace_folder, write_new
from timm_selfconv.models import WEIGHTS_DIR

__all__ = [
    'card_facts', 'card_path', 'default_weights', 'load_shards', 'measured_accuracy', 'model_card', 'save_folder',
    'save_shards', 'save_weights', 'shipped_names', 'weights_path',
]


def weights_path(name: str) -> Path:
    """Where weights lie if they ship with the package.

    Args:
        name: Registered name of a net, for its weights from scratch (tag ``cifar10``), or ``name.tag`` for others.
    """
    return WEIGHTS_DIR / f"{name.removesuffix('.cifar10')}.safetensors"


def card_path(name: str) -> Path:
    """Where the model card of weights lies if they ship with the package; for names see :func:`weights_path`."""
    return weights_path(name).with_suffix('.md')


def shipped_names() -> List[str]:
    """Names of all weights that ship, as :func:`weights_path` takes them."""
    return sorted(path.stem for path in WEIGHTS_DIR.glob('*.safetensors'))


def default_weights(name: str) -> str:
    """Name of the weights that ``pretrained=True`` loads: those from scratch before others, the name if none ship."""
    return next((n for n in shipped_names() if n == name or n.startswith(f'{name}.')), name)


def measured_accuracy(name: str) -> Optional[float]:
    """CIFAR-10 test accuracy that the model card of shipped weights states.

    Args:
        name: Name of the weights, see :func:`weights_path`.

    Returns:
        Accuracy between 0 and 1, or None if no card ships.
    """
    if not card_path(name).is_file():
        return None
    results = ModelCard.load(card_path(name)).data.eval_results or []
    return next((float(r.metric_value) for r in results if r.metric_type == 'accuracy'), None)


def card_facts(name: str) -> Dict[str, str]:
    """How shipped weights came about: the table of their model card.

    Args:
        name: Name of the weights, see :func:`weights_path`.

    Returns:
        Facts such as recipe, epochs, seed, hardware and time, as the card words them; empty if no card ships.
    """
    if not card_path(name).is_file():
        return {}
    return dict(re.findall(r'^\| (\w[^|]*?) \| (.*) \|$', card_path(name).read_text(), re.MULTILINE))


def portable_state_dict(model: nn.Module, dtype: torch.dtype) -> Dict[str, torch.Tensor]:
    """A model's state dict in another floating point type, on the CPU.

    Raises:
        ValueError: If a value is not finite in that type.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.to('cpu', dtype if value.is_floating_point() else value.dtype)
        if not value.isfinite().all():
            raise ValueError(f'dtype={dtype}: {name} holds values that are not finite in it')
        tensors[name] = value.contiguous()
    return tensors


def save_weights(model: nn.Module, path: Union[str, Path], dtype: torch.dtype = torch.float16) -> None:
    """Save a model's state dict as safetensors, floating point tensors in another dtype.

    Args:
        model: The model.
        path: Where to; must end in .safetensors and not exist yet.
        dtype: Floating point type of the file.

    Raises:
        ValueError: If the path ends otherwise, or a value is not finite in that type.
        FileExistsError: If the file exists.
    """
    if Path(path).suffix != '.safetensors':
        raise ValueError(f'path={str(path)!r}: needs the ending .safetensors')
    write_new(path, safetensors.torch.save(portable_state_dict(model, dtype), metadata={'format': 'pt'}))


def save_shards(model: nn.Module, folder: Union[str, Path], dtype: torch.dtype = torch.float16) -> None:
    """Save a model's state dict as safetensors of less than 16 MiB each, for transports that take no larger files.

    :func:`load_shards` and ``timm-selfconv export --checkpoint FOLDER`` read them.

    Args:
        model: The model.
        folder: Where to. Unlike :func:`save_weights` this replaces what an earlier call left there, whole.
        dtype: Floating point type of the files.

    Raises:
        ValueError: If a value is not finite in that type.
    """
    with replace_folder(folder) as temporary:
        huggingface_hub.save_torch_state_dict(portable_state_dict(model, dtype), temporary, max_shard_size='16MB')


def load_shards(model: nn.Module, folder: Union[str, Path]) -> None:
    """Load the safetensors files of a folder, all of them and nothing else.

    An index beside them is not read: it could name a file of another kind, and a pickle runs code.

    Args:
        model: Gets the weights, each parameter and buffer from one of the files.
        folder: What :func:`save_shards` wrote.

    Raises:
        ValueError: If there are no such files, or what they hold is not this model's.
    """
    state_dict: Dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob('*.safetensors')):
        try:
            state_dict.update(safetensors.torch.load_file(file))
        except SafetensorError as e:
            raise ValueError(f'folder={str(folder)!r}: {file.name} cannot be read ({e})') from e
    if not state_dict:
        raise ValueError(f'folder={str(folder)!r}: needs .safetensors files')
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as e:
        raise ValueError(f'folder={str(folder)!r}: holds weights of another net ({e})') from e


def save_folder(model: nn.Module, folder: Union[str, Path]) -> None:
    """Save a net as the folder that timm's ``local-dir:`` and ``hf-hub:`` models are, whole or not at all.

    Args:
        model: A net that timm made.
        folder: Where to; must not exist yet.

    Raises:
        FileExistsError: If there is something already; it is left alone.
    """
    with new_folder(folder) as temporary:
        timm.models.save_for_hf(model, str(temporary), safe_serialization=True)


def model_card(name: str, accuracy: float, images: int, facts: Dict[str, str]) -> str:
    """A model card in the Hub's format.

    Args:
        name: Name of the weights, see :func:`weights_path`.
        accuracy: Measured accuracy on the CIFAR-10 test split, between 0 and 1.
        images: How many images it was measured on.
        facts: How the weights came about (recipe, epochs, seed, hardware, ...), a table row each, in order.

    Returns:
        Markdown with the metadata block that :func:`measured_accuracy` and the Hub read.
    """
    data = ModelCardData(
        license='apache-2.0',
        library_name='timm',
        pipeline_tag='image-classification',
        tags=['image-classification', 'timm', 'timm_selfconv', 'self-attention', 'cifar10'],
        datasets=['uoft-cs/cifar10'],
        model_name=name,
        eval_results=[EvalResult(
            task_type='image-classification',
            dataset_type='uoft-cs/cifar10',
            dataset_name='CIFAR-10',
            dataset_split='test',
            metric_type='accuracy',
            metric_value=accuracy,
        )],
    )
    rows = '\n'.join(f'| {key} | {value} |' for key, value in facts.items())
    return f"""---
{data.to_yaml()}
---

# {name}

| | |
|---|---|
{rows}
| test accuracy | {accuracy:.4f} ({images:,} images of the CIFAR-10 test split, from this file, in eval mode) |

```python
import timm
import timm_selfconv  # registers the model

model = timm.create_model('{name}', pretrained=True).eval()
```
"""
