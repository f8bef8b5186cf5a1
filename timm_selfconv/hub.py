"""Weights: how they are saved, with their model cards, and how they get to the Hub."""
import tempfile
from contextlib import contextmanager, suppress
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import huggingface_hub
import safetensors.torch
import timm.models
import torch
import torch.nn as nn
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData, hf_hub_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from safetensors import SafetensorError
from timm.data import resolve_data_config

from timm_selfconv.files import new_folder, replace_file, replace_folder, write_new
from timm_selfconv.models._weights import REVISION, WEIGHTS_FILE, require_hub
from timm_selfconv.weights import LICENSE

__all__ = [
    'collect', 'differing_files', 'load_shards', 'model_card', 'publish', 'record_checksum', 'save_folder',
    'save_shards', 'save_weights',
]


def record_checksum(path: Path, checksum: str) -> None:
    """Enter a weight file in the ``SHA256SUMS`` beside it, which ``sha256sum -c`` reads."""
    sums = path.with_name('SHA256SUMS')
    lines = sums.read_text().splitlines() if sums.is_file() else []
    others = [line for line in lines if line.split()[1] != path.name]
    text = '\n'.join(sorted([*others, f'{checksum}  {path.name}'], key=lambda line: line.split()[1]))
    replace_file(sums, lambda file: file.write_text(f'{text}\n'))


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


@contextmanager
def write_errors(path: Union[str, Path]) -> Iterator[None]:
    """Raises the errors of safetensors while it writes, such as those of a full disk, as an OSError."""
    try:
        yield
    except SafetensorError as e:
        raise OSError(f'{path} cannot be written ({e})') from e


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
    with write_errors(folder), replace_folder(folder) as temporary:
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
        OSError: If it can't be written whole.
    """
    with write_errors(folder), new_folder(folder) as temporary:
        timm.models.save_for_hf(model, str(temporary), safe_serialization=True)


def model_card(
        name: str,
        accuracy: float,
        images: int,
        facts: Dict[str, str],
        measured_on: Optional[str] = None,
        file: Optional[str] = None,
) -> str:
    """A model card in the Hub's format.

    Args:
        name: Name of the weights, see :func:`timm_selfconv.weights.weights_path`.
        accuracy: Measured accuracy, between 0 and 1.
        images: How many images it was measured on.
        facts: How the weights came about (recipe, epochs, seed, hardware, ...), a table row each, in order.
        measured_on: Which images those are; the CIFAR-10 test split by default, and then the metadata says so too.
        file: The weight file that the card's snippet loads; by default it loads what ``pretrained=True`` does.

    Returns:
        Markdown with the metadata block that :func:`timm_selfconv.weights.measured_accuracy` and the Hub read.
    """
    on_cifar10: Dict[str, Any] = dict(
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
    data = ModelCardData(
        license=LICENSE,
        library_name='timm',
        pipeline_tag='image-classification',
        tags=['image-classification', 'timm', 'timm_selfconv', 'self-attention', 'cifar10'],
        **(on_cifar10 if measured_on is None else {}),
    )
    rows = '\n'.join(f'| {key} | {value} |' for key, value in facts.items())
    net, source = name if '.' in name else f'{name}.cifar10', ''
    if file is not None:  # of a tag that may not be registered
        net, source = name.partition('.')[0], f", pretrained_cfg_overlay=dict(file='{file}')"
    return f"""---
{data.to_yaml()}
---

# {name}

| | |
|---|---|
{rows}
| test accuracy | {accuracy:.4f} ({images:,} images of {measured_on or 'the CIFAR-10 test split'}, from this file, \
in eval mode) |

```python
import timm
import timm_selfconv  # registers the model

model = timm.create_model('{net}', pretrained=True{source}).eval()
```
"""


@contextmanager
def client_errors(repo_id: str) -> Iterator[None]:
    """What the Hub's client raises, as an OSError that names the repository.

    The errors of its HTTP library are not all OSErrors, and that library changed with the client's versions.
    """
    try:
        yield
    except Exception as e:
        raise OSError(f'{repo_id}: {e or type(e).__name__}') from e


def differing_files(folder: Path, repo_id: str) -> List[str]:
    """Names of a folder's files that a repository on the Hub does not have with the same content."""
    there: Dict[str, str] = {}
    with client_errors(repo_id), suppress(RepositoryNotFoundError):
        require_hub()
        tree = HfApi().list_repo_tree(repo_id, recursive=True)
        files = (file for file in tree if isinstance(file, RepoFile))
        there.update((file.path, file.blob_id if file.lfs is None else file.lfs.sha256) for file in files)
    names = []
    for path in sorted(filter(Path.is_file, folder.rglob('*'))):
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        blob = sha1(b'blob %d\0' % len(content) + content)
        if there.get(name) not in (blob.hexdigest(), sha256(content).hexdigest()):
            names.append(name)
    return names


def publish(folder: Union[str, Path], repo_id: str, private: bool = False) -> List[str]:
    """Bring a repository on the Hub to what a folder holds: one commit of what differs, tagged with the version.

    Whoever was interrupted calls it again; what has arrived is not sent twice.

    Args:
        folder: A net's page: ``model.safetensors``, ``config.json``, ``README.md`` and what else belongs to it.
        repo_id: Where to, 'owner/name'; made if need be.
        private: Whether only its owner can see a repository that is made.

    Returns:
        Names of the files that were sent.

    Raises:
        ValueError: If the folder holds no net.
        OSError: If what can be downloaded afterwards is not what was sent, or gives other logits.
    """
    api, folder = HfApi(), Path(folder)
    if not all((folder / name).is_file() for name in ('config.json', WEIGHTS_FILE)):
        raise ValueError(f'folder={str(folder)!r}: needs config.json and {WEIGHTS_FILE}')
    names = differing_files(folder, repo_id)
    with client_errors(repo_id):
        if names:
            api.create_repo(repo_id, private=private, exist_ok=True)
            api.create_commit(
                repo_id, [CommitOperationAdd(name, folder / name) for name in names],
                commit_message=f'timm_selfconv {REVISION}')
        refs = api.list_repo_refs(repo_id)
        tagged = {ref.name: ref.target_commit for ref in refs.tags}.get(REVISION)
        if tagged != next(ref.target_commit for ref in refs.branches if ref.name == 'main'):
            if tagged is not None:
                api.delete_tag(repo_id, tag=REVISION)
            api.create_tag(repo_id, tag=REVISION)
    if names:
        check_published(folder, repo_id)
    return names


def check_published(folder: Path, repo_id: str) -> None:
    """Download a repository into an empty cache and compare it with the folder, bytes and logits."""
    with tempfile.TemporaryDirectory() as cache:
        for path in filter(Path.is_file, folder.rglob('*')):
            name = path.relative_to(folder).as_posix()
            with client_errors(repo_id):
                there = Path(hf_hub_download(repo_id, name, revision=REVISION, cache_dir=cache))
            if there.read_bytes() != path.read_bytes():
                raise OSError(f'{repo_id}: {name} on the Hub differs from what was sent')
        sources = (f'hf-hub:{repo_id}@{REVISION}', f'local-dir:{folder}')
        nets = [timm.create_model(source, pretrained=True, cache_dir=cache).eval() for source in sources]
        image = torch.randn(1, *resolve_data_config({}, model=nets[0])['input_size'])
        with torch.inference_mode():
            logits = [net(image) for net in nets]
        if not torch.equal(*logits):
            raise OSError(f'{repo_id}: the net on the Hub gives other logits than the one that was sent')


def collect(names: Sequence[str], owner: str) -> str:
    """Put nets of an owner into one collection on the Hub, made if need be.

    Returns:
        The collection's address.
    """
    api = HfApi()
    collection = api.create_collection('timm_selfconv', namespace=owner, exists_ok=True)
    there = {item.item_id for item in collection.items}
    for name in names:
        if f'{owner}/{name}' not in there:
            api.add_collection_item(collection.slug, f'{owner}/{name}', 'model', exists_ok=True)
    return collection.url
