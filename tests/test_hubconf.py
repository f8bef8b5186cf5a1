"""Entrypoints for torch.hub."""
import subprocess
import sys

import pytest
import timm
import torch

from timm_selfconv.models import zoo_names


def test_every_model_is_listed_described_and_loads(repo):
    """As torch.hub.list and torch.hub.help do, which work only with GitHub."""
    hubconf = torch.hub._import_module('hubconf', repo / 'hubconf.py')
    listed = [n for n in dir(hubconf) if callable(getattr(hubconf, n)) and not n.startswith('_')]
    assert sorted(listed) == sorted(zoo_names())
    for name in listed:
        assert getattr(hubconf, name).__doc__ == timm.model_entrypoint(name).__doc__
        model = torch.hub.load(str(repo), name, source='local', num_classes=3, device='meta')
        assert model.num_classes == 3 and model.pretrained_cfg['architecture'] == name


@pytest.mark.slow
def test_dependencies_are_what_nets_need(repo):
    subprocess.run([sys.executable, '-c', 'import sys, hubconf; assert set(hubconf.dependencies) <= set(sys.modules)'],
                   cwd=repo, check=True)
