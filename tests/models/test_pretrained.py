import time

import pytest
import timm
import torch

from timm_selfconv import hub
from timm_selfconv.measure.tables import zoo_names

ZOO = zoo_names()


@pytest.mark.parametrize('name', ZOO)
def test_every_net_loads_what_ships_or_says_what_to_do(name, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    start = time.perf_counter()
    if hub.weights_path(name).is_file():
        model = timm.create_model(name, pretrained=True).eval()
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()
        assert timm.create_model(name, pretrained=True, num_classes=5, in_chans=1).num_classes == 5
        assert name in timm.list_models(pretrained=True, include_tags=False)
        assert timm.get_pretrained_cfg(name).license == 'apache-2.0'
    else:
        with pytest.raises(RuntimeError, match=rf'{name} has no trained weights.*recipes/README.md.*pretrained_cfg'):
            timm.create_model(name, pretrained=True)
        assert not timm.is_model_pretrained(name)
    assert time.perf_counter() - start < 30  # an unreachable Hub costs 46 seconds of retries


def test_weights_of_ones_own_need_none_that_ship(tmp_path):
    model = timm.create_model('sa_quadratic_gen_cifar', embed_dim=8, depth=1)
    hub.save_weights(model, tmp_path / 'own.safetensors', dtype=torch.float32)
    for overlay in (dict(file=str(tmp_path / 'own.safetensors')), dict(state_dict=model.state_dict())):
        loaded = timm.create_model(
            'sa_quadratic_gen_cifar', pretrained=True, pretrained_cfg_overlay=overlay, embed_dim=8, depth=1)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_saved_for_the_hub_and_loaded_from_a_folder(tmp_path):
    model = timm.create_model('sa_quadratic_gen_pruned_cifar', embed_dim=8, depth=2, num_heads=(2, 3)).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    x = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(again(x), model(x))
