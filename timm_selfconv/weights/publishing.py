"""Upload of nets to the Hub, a repository per net."""
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
        model: nn.Module, repo_id: str, card: str, private: bool = False, weights: Optional[Path] = None) -> str:
    """Upload a net to the Hub in one commit, like push_to_hf_hub of timm, but replace an old card.

    Creates the repository 'owner/name' if it does not exist. ``card`` is the text of its README.md. ``weights`` is a
    file to upload instead of the weights of the model; the commit then gets the tag of this version.

    Returns:
        Address of the commit.

    Raises:
        OSError: If the Hub does not answer, has no such owner, or refuses, or ``private`` meets a public repository.
    """
    api = HfApi()
    with hub_errors(repo_id), tempfile.TemporaryDirectory() as folder:
        write_net(model, folder, card)
        if weights is not None:
            shutil.copyfile(weights, Path(folder, WEIGHTS_FILE))
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise ValueError('private=True, but the repository exists and is public')
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message='Upload by timm_selfconv')
        if weights is not None:
            tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}
            if tags.get(REVISION, commit.oid) != commit.oid:
                api.delete_tag(repo_id, tag=REVISION)
            api.create_tag(repo_id, tag=REVISION, revision=commit.oid, exist_ok=True)
    return str(commit)
