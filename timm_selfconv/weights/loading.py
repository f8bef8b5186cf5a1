"""Weights of the zoo's nets: the package's, else those in the Hub's cache, else the Hub's. Their bytes are checked."""
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, Dict, Optional

import safetensors.torch
import torch
from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_download, hf_hub_url, \
    try_to_load_from_cache
from timm.models import PretrainedCfg

from . import checksums, weights_path

__all__ = [
    'OWNER', 'REVISION', 'WEIGHTS_FILE', 'hub_id', 'own_state_dict', 'read_weights', 'require_hub', 'weight_sources']

WEIGHTS_FILE = 'model.safetensors'  # on the Hub
OWNER = os.environ.get('TIMM_SELFCONV_HUB', 'timm-selfconv')
REVISION = 'v0.2.0'  # the tag of each repository that belongs to this version of the package


def hub_id(name: str) -> str:
    """The repository of weights on the Hub, with its tag, as timm's ``hf_hub_id``."""
    return f'{OWNER}/{name}@{REVISION}'


def weight_sources(name: str) -> Dict[str, Dict[str, str]]:
    """Keys of timm's configurations that say where the weights of a net are, by tag.

    The tag ``cifar10`` is always there, without a source if there are no such weights.
    """
    tagged = [entry for entry in checksums() if entry.startswith(f'{name}.')]
    return {
        entry.partition('.')[2] or 'cifar10': dict(hf_hub_id=hub_id(entry), hf_hub_filename=WEIGHTS_FILE)
        if entry in checksums() else {} for entry in (*tagged, name)}


def own_state_dict(cfg: PretrainedCfg) -> Optional[Dict[str, torch.Tensor]]:
    """State dict that a configuration of :func:`weight_sources` stands for, parsed from bytes that were checked.

    Returns:
        None if the configuration names weights from elsewhere.

    Raises:
        RuntimeError: See :func:`read_weights`.
    """
    name = f'{cfg.architecture}.{cfg.tag}'.removesuffix('.cifar10')
    if cfg.state_dict or cfg.file or cfg.source not in (None, '', 'timm') or cfg.hf_hub_id != hub_id(name):
        return None
    return safetensors.torch.load(read_weights(name))


def read_weights(name: str) -> bytes:
    """Content of a weight file: the package's, else that in the Hub's cache if it is whole, else the Hub's.

    Args:
        name: Name of the weights, see :func:`timm_selfconv.weights.weights_path`.

    Raises:
        RuntimeError: If it can't be had, or its bytes are not those that this version of the package was released with.
    """
    def whole(content: bytes) -> bool:
        return sha256(content).hexdigest() == checksums()[name]

    path = weights_path(name)
    if path.is_file():
        content, remedy = path.read_bytes(), f'{path} is not the one of the package: install it anew'
    else:
        cached = try_to_load_from_cache(f'{OWNER}/{name}', WEIGHTS_FILE, revision=REVISION)
        content = Path(cached).read_bytes() if isinstance(cached, str) else b''
        if not whole(content):
            content = download(name, anew=isinstance(cached, str)).read_bytes()
        remedy = f'{OWNER}/{name} on {constants.ENDPOINT} holds others than this version of timm_selfconv: update it'
    if not whole(content):
        raise RuntimeError(
            f'{name}: its weights are damaged or of another version (their SHA-256 is not that of '
            f'weights/SHA256SUMS); {remedy}')
    return content


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


def download(name: str, anew: bool) -> Path:
    """Download a weight file; ``anew`` replaces the one in the client's cache."""
    repo: Dict[str, Any] = dict(repo_id=f'{OWNER}/{name}', filename=WEIGHTS_FILE, revision=REVISION)
    remedy = f"pretrained=False, or weights of your own: pretrained_cfg_overlay=dict(file='{WEIGHTS_FILE}')"
    if constants.HF_HUB_OFFLINE:
        raise RuntimeError(
            f'{name}: its weights are not in the package, {"damaged" if anew else "not"} in the cache, and '
            f'HF_HUB_OFFLINE forbids to download them; unset it, or take {remedy}')
    try:
        # one try, which says at once that nothing answers, where the download would try for minutes
        etag = get_hf_file_metadata(hf_hub_url(**repo), timeout=constants.HF_HUB_ETAG_TIMEOUT).etag
        if not re.fullmatch(r'\w[\w.=+-]*', etag or ''):  # the client writes to a path that ends in it
            raise OSError(f'its ETag {etag!r} is no name of a file')
        return Path(hf_hub_download(**repo, force_download=anew))
    except Exception as e:  # whatever the client's HTTP library raises: it changed with the client's versions
        raise RuntimeError(
            f'{OWNER}/{name}: cannot be downloaded from {constants.ENDPOINT} ({e or type(e).__name__}); check the '
            f'network, log in (hf auth login), name another owner (TIMM_SELFCONV_HUB), or take {remedy}') from e
