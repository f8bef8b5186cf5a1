"""Where trained weights come from: the package, else the Hub's cache, else the Hub. Their bytes are checked."""
import os
from functools import cache
from pathlib import Path
from typing import Any, Dict

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_download, hf_hub_url, \
    try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from timm_selfconv.files import sha256
from timm_selfconv.weights import checksums, weights_path

__all__ = ['OWNER', 'REVISION', 'WEIGHTS_FILE', 'hub_id', 'locate_weights', 'require_hub']

WEIGHTS_FILE = 'model.safetensors'  # on the Hub
OWNER = os.environ.get('TIMM_SELFCONV_HUB', 'timm-selfconv')
REVISION = 'v0.2.0'  # the tag of each repository that belongs to this version of the package


def hub_id(name: str) -> str:
    """The repository of a net on the Hub, with its tag, as timm's ``hf_hub_id``."""
    return f'{OWNER}/{name}@{REVISION}'


@cache
def checked(path: Path, modified: int, wanted: str) -> bool:
    """Whether a file has a checksum; read once per process, file and time of modification (in nanoseconds)."""
    return sha256(path) == wanted


def locate_weights(name: str) -> Path:
    """The weight file of a net, downloaded if need be.

    Args:
        name: A registered net, with its tag if it is not the default one.

    Raises:
        RuntimeError: If it can't be had, or its bytes are not those that this version of the package was released with.
    """
    path, source = weights_path(name), 'the package'
    if not path.is_file():
        path, source = download(name), f'{OWNER}/{name} on the Hub'
    if not checked(path, path.stat().st_mtime_ns, checksums()[name]):
        raise RuntimeError(
            f'{name}: the weights from {source} are damaged or of another version (their SHA-256 is not that of '
            f'weights/SHA256SUMS); remove {path} and try again')
    return path


def require_hub() -> None:
    """Ask the Hub for an answer, once, where its client would try for minutes; not if HF_HUB_OFFLINE forbids it.

    Raises:
        OSError: If none comes within the client's time-out, HF_HUB_ETAG_TIMEOUT (in seconds).
    """
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as e:  # whatever the client's HTTP library raises: it changed with the client's versions
        raise OSError(
            f'{constants.ENDPOINT} does not answer ({e or type(e).__name__}); check the network, or take what has been '
            'downloaded before: HF_HUB_OFFLINE=1') from e


def download(name: str) -> Path:
    """The weight file of a net, from the Hub's cache if it is there."""
    repo: Dict[str, Any] = dict(repo_id=f'{OWNER}/{name}', filename=WEIGHTS_FILE, revision=REVISION)
    cached = try_to_load_from_cache(**repo)
    if isinstance(cached, str):
        return Path(cached)
    remedy = f"pretrained=False, or weights of your own: pretrained_cfg_overlay=dict(file='{WEIGHTS_FILE}')"
    if constants.HF_HUB_OFFLINE:
        raise RuntimeError(
            f'{name}: its weights are neither in the package nor in the cache, and HF_HUB_OFFLINE forbids to download '
            f'them; unset it, or take {remedy}')
    try:
        # one try, which says at once that nothing answers, where the download would try for minutes
        get_hf_file_metadata(hf_hub_url(**repo), timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(**repo))
    except HfHubHTTPError as e:
        answer = 'is not there or not for you (log in: hf auth login)' if e.response.status_code in (401, 403, 404) \
            else f'answers {e.response.status_code}'
        raise RuntimeError(
            f'{name}: {OWNER}/{name} on {constants.ENDPOINT} {answer}; TIMM_SELFCONV_HUB names another owner, or take '
            f'{remedy}') from e
    except Exception as e:  # whatever the client's HTTP library raises: it changed with the client's versions
        raise RuntimeError(
            f'{name}: cannot be downloaded from {constants.ENDPOINT} ({e or type(e).__name__}); check the '
            f'network, or take {remedy}') from e
