from pathlib import Path

import torch

from timm_selfconv.measure.tables import zoo_names

REPO = Path(__file__).resolve().parent.parent
ZOO = zoo_names()


def test_every_model_is_listed_and_described():
    """What torch.hub.list and torch.hub.help read, which take repositories on GitHub alone."""
    hubconf = torch.hub._import_module('hubconf', REPO / 'hubconf.py')
    listed = [n for n in dir(hubconf) if callable(getattr(hubconf, n)) and not n.startswith('_')]
    assert sorted(listed) == sorted(ZOO)
    for name in ZOO:
        assert getattr(hubconf, name).__name__ == name and 'pretrained:' in getattr(hubconf, name).__doc__


def test_models_load():
    for name in ZOO:
        model = torch.hub.load(str(REPO), name, source='local', num_classes=3, device='meta')
        assert model.num_classes == 3 and model.pretrained_cfg['architecture'] == name
