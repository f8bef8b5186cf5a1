"""Weights of the zoo, from the package or else from the Hub, with a checksum."""
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import LocalEntryNotFoundError, RepositoryNotFoundError
from timm.models import PretrainedCfg

from timm_selfconv.files import sha256
from timm_selfconv.version import __version__
from . import checksums, weights_path

__all__ = [
    'OWNER', 'REVISION', 'WEIGHTS_FILE', 'hub_errors', 'hub_id', 'require_hub', 'weight_sources', 'weights_file']

WEIGHTS_FILE = 'model.safetensors'  # on the Hub
OWNER = os.environ.get('TIMM_SELFCONV_HUB', 'timm-selfconv')
REVISION = f'v{__version__.partition(".dev")[0]}'  # tag of this version in each repository


def hub_id(name: str) -> str:
    """The repository of weights on the Hub with its tag, for ``hf_hub_id`` of timm."""
    return f'{OWNER}/{name}@{REVISION}'


def weight_sources(name: str) -> Dict[str, Dict[str, str]]:
    """Sources of the weights of a net by tag, for configurations of timm; ``cifar10`` can have no source."""
    tagged = [entry for entry in checksums() if entry.startswith(f'{name}.')]
    return {
        entry.partition('.')[2] or 'cifar10': dict(hf_hub_id=hub_id(entry), hf_hub_filename=WEIGHTS_FILE)
        if entry in checksums() else {} for entry in (*tagged, name)}


def weights_file(cfg: PretrainedCfg, cache_dir: Optional[str] = None) -> Optional[Path]:
    """Path of a weight file in the package, else in the cache of the Hub; None for weights of other sources.

    Raises:
        OSError: If the download fails.
        RuntimeError: If the checksum of the downloaded file differs.
    """
    name = f'{cfg.architecture}.{cfg.tag}'.removesuffix('.cifar10')
    if cfg.state_dict or cfg.file or cfg.source not in (None, '', 'timm') or cfg.hf_hub_id != hub_id(name):
        return None
    if weights_path(name).is_file():
        return weights_path(name)
    repo_id = f'{OWNER}/{name}'
    repo: Dict[str, Any] = dict(repo_id=repo_id, filename=WEIGHTS_FILE, revision=REVISION, cache_dir=cache_dir)
    cached = try_to_load_from_cache(**repo)
    if isinstance(cached, str):
        return Path(cached)
    with hub_errors(repo_id):
        file = Path(hf_hub_download(**repo))
    if sha256(file) != checksums()[name]:
        file.resolve().unlink()
        raise RuntimeError(
            f'{name}: the weights of {repo_id} on {constants.ENDPOINT} are damaged or of another version of '
            'timm_selfconv (their SHA-256 is not in weights/SHA256SUMS); try again, or update timm_selfconv')
    return file


def require_hub() -> None:
    """Raise an OSError if the Hub does not answer, because its client would retry for minutes."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as e:  # the HTTP library differs between versions of the client
        raise OSError(
            f'{constants.ENDPOINT} does not answer ({e or type(e).__name__}); check the network, or use earlier '
            'downloads with HF_HUB_OFFLINE=1') from e


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turn errors of the Hub into an OSError with the repository and the reason."""
    require_hub()
    try:
        yield
    except RepositoryNotFoundError as e:
        raise OSError(f'{repo_id}: no such repository on the Hub (404), or a private one: hf auth login') from e
    except Exception as e:  # of an HTTP library
        reason = (isinstance(e, LocalEntryNotFoundError) and e.__cause__) or e
        raise OSError(f'{repo_id}: {reason or type(reason).__name__}') from e
