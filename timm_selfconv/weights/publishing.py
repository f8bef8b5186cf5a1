"""Nets on the Hub: a repository each."""
import tempfile
from pathlib import Path
from typing import Union

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download

from timm_selfconv.files import os_errors
from .loading import REVISION, WEIGHTS_FILE, require_hub

__all__ = ['publish']


def publish(folder: Union[str, Path], repo_id: str, private: bool = False) -> bool:
    """Bring a repository on the Hub to what a folder holds: one commit of what differs, tagged with the version.

    It is tagged once all of it was downloaded again and compared. After an interruption call it again: what has
    arrived is not sent twice.

    Args:
        folder: A net's page: ``model.safetensors``, ``config.json``, ``README.md`` and what else belongs to it.
        repo_id: Repository, 'owner/name', created if need be.
        private: Make a new repository one that only its owner can see.

    Returns:
        Whether there was something to do.

    Raises:
        ValueError: If the folder holds no net.
        OSError: If the Hub can't be reached or refuses, or what can be downloaded afterwards is not what was sent.
    """
    api, folder = HfApi(), Path(folder)
    if not all((folder / name).is_file() for name in ('config.json', WEIGHTS_FILE)):
        raise ValueError(f'folder={str(folder)!r}: needs config.json and {WEIGHTS_FILE}')
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob('*') if path.is_file()}
    # not all errors of the client's HTTP library are OSErrors, and that library changed with its versions
    with os_errors(repo_id, Exception), tempfile.TemporaryDirectory() as cache:
        require_hub()
        api.create_repo(repo_id, private=private, exist_ok=True)
        additions = [CommitOperationAdd(name, path) for name, path in files.items()]
        commit = api.create_commit(repo_id, additions, commit_message=f'timm_selfconv {REVISION}')
        tagged = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}.get(REVISION)
        if tagged == commit.oid:  # the client leaves unchanged files out, and makes no empty commit
            return False
        for name, path in files.items():
            there = Path(hf_hub_download(repo_id, name, revision=commit.oid, cache_dir=cache))
            if there.read_bytes() != path.read_bytes():
                raise OSError(f'{name} on the Hub differs from what was sent')
        if tagged is not None:
            api.delete_tag(repo_id, tag=REVISION)
        api.create_tag(repo_id, tag=REVISION, revision=commit.oid)
    return True
