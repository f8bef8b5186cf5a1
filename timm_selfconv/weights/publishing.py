"""Nets on the Hub: a repository each."""
import shutil
import tempfile
from pathlib import Path
from typing import Optional

import torch.nn as nn
from huggingface_hub import HfApi

from .loading import REVISION, WEIGHTS_FILE, hub_errors
from .saving import write_net

__all__ = ['publish']


def publish(
        model: nn.Module,
        repo_id: str,
        card: str,
        private: bool = False,
        weights: Optional[Path] = None,
) -> str:
    """Upload a net to a repository on the Hub, in one commit of what differs, as timm's push_to_hf_hub does.

    timm's function would keep an old card, and write a configuration that transformers can't read.

    Args:
        model: A net that timm made.
        repo_id: Repository, 'owner/name', created if need be.
        card: Its README.md.
        private: Make a new repository one that only its owner can see.
        weights: File to upload in place of the model's own weights: these belong to this version of the package, and the
            commit gets the version's tag.

    Returns:
        The commit's address.

    Raises:
        OSError: If the Hub can't be reached, has no such owner, or refuses.
    """
    api = HfApi()
    with hub_errors(repo_id), tempfile.TemporaryDirectory() as folder:
        write_net(model, folder, card)
        if weights is not None:
            shutil.copyfile(weights, Path(folder, WEIGHTS_FILE))
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message='Upload by timm_selfconv',
            allow_patterns=['config.json', WEIGHTS_FILE, 'README.md'])
        if weights is not None:
            if any(ref.name == REVISION and ref.target_commit != commit.oid for ref in api.list_repo_refs(repo_id).tags):
                api.delete_tag(repo_id, tag=REVISION)
            api.create_tag(repo_id, tag=REVISION, revision=commit.oid, exist_ok=True)
    return str(commit)
