"""Weight files, folders and model cards, written atomically."""
import json
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Union

import safetensors.torch
import timm.models
import torch
import torch.nn as nn
from huggingface_hub import EvalResult, ModelCardData
from safetensors import SafetensorError

from timm_selfconv.files import new_folder, os_errors, replace_file, write_new
from . import LICENSE, named_net, read_sums, tagged_name, teachers

__all__ = ['card_text', 'model_card', 'record_checksum', 'save_folder', 'save_weights', 'write_net']


def record_checksum(path: Path, checksum: str) -> None:
    """Add a weight file to ``SHA256SUMS`` in its folder, in the format of ``sha256sum``."""
    sums = path.with_name('SHA256SUMS')
    known = sorted({**read_sums(sums), path.name: checksum}.items())
    replace_file(sums, lambda file: file.write_text(''.join(f'{value}  {name}\n' for name, value in known)))


def save_weights(model: nn.Module, path: Union[str, Path], dtype: torch.dtype = torch.float16) -> None:
    """Save a state dict as a new safetensors file, with floating point tensors in ``dtype``."""
    if Path(path).suffix != '.safetensors':
        raise ValueError(f'path={str(path)!r}: needs the ending .safetensors')
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.to('cpu', dtype if value.is_floating_point() else value.dtype)
        if not value.isfinite().all():
            raise ValueError(f'dtype={dtype}: {name} has values that are not finite in this type')
        tensors[name] = value.contiguous()
    write_new(path, safetensors.torch.save(tensors, metadata={'format': 'pt'}))


def write_net(model: Any, folder: Union[str, Path], card: Optional[str] = None) -> None:
    """Write a net made by timm into a folder, for ``local-dir:`` and ``hf-hub:`` of timm, and for transformers.

    transformers passes ``num_classes`` to timm, reads only ``label_names`` at the top level, and computes in the dtype
    of the weight file if ``torch_dtype`` is missing.
    """
    with os_errors(f'{folder} cannot be written', SafetensorError):
        names = model.pretrained_cfg.get('label_names') or ()
        keys = dict(label_names=names if len(names) == model.num_classes else None, torch_dtype='float32')
        timm.models.save_for_hf(model, str(folder), model_config=keys, safe_serialization=True)
        file = Path(folder, 'config.json')
        config = json.loads(file.read_text())
        config['model_args'].pop('num_classes')
        config['pretrained_cfg'].pop('label_names', None)
        file.write_text(json.dumps(config, indent=2))
        if card is not None:
            file.with_name('README.md').write_text(card)


def save_folder(model: nn.Module, folder: Union[str, Path]) -> None:
    """Write a net into a new folder atomically, see :func:`write_net`."""
    with new_folder(folder) as temporary:
        write_net(model, temporary)


# rows of the first table of a card; the other rows are about the training
NET_ROWS = (
    'input', 'classes', 'parameters', 'multiply-adds', 'test accuracy', 'validation accuracy', 'published accuracy',
    'license')
CREATE = """## Use

```bash
pip install timm_selfconv  # not on PyPI yet: run pip install . in a checkout
```

```python
import timm
import timm_selfconv  # registers the model

model = timm.create_model({create}).eval()
```
"""
CLASSIFY = """
```python
from PIL import Image
from timm.data import create_transform, resolve_data_config

transform = create_transform(**resolve_data_config({}, model=model))
image = transform(Image.open('cat.jpg').convert('RGB'))[None]
probabilities = model(image).softmax(-1)[0]
print(model.pretrained_cfg['label_names'][probabilities.argmax()])
features = model.forward_intermediates(image, intermediates_only=True)  # a feature map per layer or stage
```
"""
COMMANDS = """
```bash
timm-selfconv eval {name} --data hfds/uoft-cs/cifar10  # the accuracy above
{explore}```
"""


def table(facts: Dict[str, Any]) -> str:
    rows = [f'| {key} | {value} |\n' for key, value in facts.items() if value not in (None, '')]
    return ''.join(['| | |\n|---|---|\n', *rows, '\n']) if rows else ''


def limits(accuracy: float, images: int, facts: Dict[str, Any]) -> str:
    """Return the section of a card about the limits of the net and of its accuracy."""
    points = 196 * (accuracy * (1 - accuracy) / images) ** 0.5
    lines = [
        'It assigns one of the classes above to every image.',
        'The transform resizes images to the input size. Accuracy at other sizes was not measured.',
        f'The 95 % confidence interval of the test accuracy is ±{points:.1f} points. It does not include the variation '
        'between training runs.']
    if 'phases' in facts:
        lines.append('Training continued after the test accuracy of earlier phases was known.')
    begun = named_net(facts, 'initialised from')
    if named_net(facts, 'teacher') or (begun and teachers(begun)):
        lines.append('Another model helped to train it, so its accuracy is no evidence of learning from labels alone.')
    elif begun:
        lines.append(f'Training started from `{begun}`, which learned from labels alone.')
    return '\n## Limits\n\n' + ''.join(f'- {line}\n' for line in lines)


def card_text(
        name: str, summary: str, facts: Dict[str, Any], create: str, tags: Sequence[str] = (), more: str = '',
        **data: Any,
) -> str:
    """A model card in the Hub's format.

    ``facts`` are rows of the tables of net and training; ``arguments`` become a code block. ``create`` are arguments of
    timm.create_model, ``more`` is text before the section about the training, and ``data`` is metadata for
    huggingface_hub.ModelCardData.
    """
    task = 'image-classification'
    metadata = ModelCardData(
        library_name='timm', pipeline_tag=task, tags=[task, 'timm', 'timm_selfconv', *tags], **data)
    net = table({key: facts.get(key) for key in NET_ROWS})
    training = table({key: fact for key, fact in facts.items() if key not in (*NET_ROWS, 'arguments')})
    if facts.get('arguments'):
        training += f"Arguments in addition to the recipe:\n\n```text\n{facts['arguments']}\n```\n"
    return (f'---\n{metadata.to_yaml()}\n---\n\n# {name}\n\n{summary}\n\n{net}{CREATE.format(create=create)}{more}'
            + (training and f'\n## Training\n\n{training.rstrip()}\n'))


def model_card(
        name: str, summary: str, accuracy: float, images: int, facts: Dict[str, str],
        measured_on: Optional[str] = None, file: Optional[str] = None,
) -> str:
    """Return the model card of weights of the zoo, with the Hub's metadata (:func:`card_text`).

    ``accuracy``, between 0 and 1, was measured on this number of ``images``. ``measured_on`` describes them, by default
    as the CIFAR-10 test split, which the metadata names too. The code of the card loads ``file``, by default the tag.
    """
    data: Dict[str, Any] = dict(license=LICENSE)
    if measured_on is None:
        result = EvalResult('image-classification', 'uoft-cs/cifar10', 'CIFAR-10', 'accuracy', accuracy,
                            dataset_split='test')
        data.update(datasets=['uoft-cs/cifar10'], model_name=name, eval_results=[result])
    kind = 'convolution' if name.startswith('resnet') else 'self-attention'
    create = f"'{tagged_name(name)}', pretrained=True"
    if file is not None:  # the tag may not be registered
        create = f"'{name.partition('.')[0]}', pretrained=True, pretrained_cfg_overlay=dict(file='{file}')"
    measured = f"({images:,} images of {measured_on or 'the CIFAR-10 test split'}, from this file, in eval mode)"
    facts = {**facts, 'test accuracy': f'{accuracy:.4f} {measured}', 'license': LICENSE}
    explore = f'timm-selfconv explore {tagged_name(name)} cat.jpg --output explorer.html\n'
    commands = COMMANDS.format(name=tagged_name(name), explore=explore if kind == 'self-attention' else '')
    more = CLASSIFY + (commands if file is None else '') + limits(accuracy, images, facts)
    return card_text(name, summary, facts, create, (kind, 'cifar10'), more, **data)
