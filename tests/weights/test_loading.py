import dataclasses
import socket

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import generate_default_cfgs

from timm_selfconv import weights
from timm_selfconv.models import _cfg, zoo_names
from timm_selfconv.weights import loading, saving


@pytest.mark.parametrize('name', zoo_names())
def test_every_net_loads_what_ships_or_says_what_to_do(name, images, monkeypatch):
    def refuse(*args):
        raise AssertionError('looks for weights in the network')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    if weights.weights_path(name).is_file():
        model = timm.create_model(name, pretrained=True).eval()
        assert model(images(1, 3, 32, 32)).isfinite().all()
        if 'tiny' in name or 'hier' in name:
            assert timm.create_model(name, pretrained=True, num_classes=5, in_chans=1).num_classes == 5
        assert name in timm.list_models(pretrained=True, include_tags=False)
        assert timm.get_pretrained_cfg(name).license == 'apache-2.0'
    else:
        with pytest.raises(RuntimeError, match=rf'{name} has no trained weights.*recipes/README.md.*pretrained_cfg'):
            timm.create_model(name, pretrained=True)
        assert not timm.is_model_pretrained(name)


def test_weights_that_did_not_learn_from_labels_only_load_by_tag():
    name = 'sa_quadratic_gen_pruned_cifar'
    for tag in ('', '.cifar10'):
        with pytest.raises(RuntimeError, match=rf"no trained .* by tag: '{name}\.from_.*' \(begun in .*taught by"):
            timm.create_model(f'{name}{tag}', pretrained=True)
    assert timm.list_models(f'{name}*', pretrained=True) == [f'{name}.from_quadratic_cifar10']


def test_every_file_of_weights_is_a_tag_of_its_net(tmp_path, monkeypatch):
    """The default is from labels only, with weights or without, though timm takes the first tag that has some."""
    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)
    for stem in ('net', 'net.included', 'network', 'other.longer'):  # the files may lie on the Hub
        saving.record_checksum(tmp_path / f'{stem}.safetensors', '0' * 64)
    cfgs = generate_default_cfgs(_cfg.cifar_cfgs('net', 'other', classifier='head.fc'))
    assert [list(cfgs[name].tags) for name in ('net', 'other')] == [['cifar10', 'included'], ['cifar10', 'longer']]
    assert cfgs['net'].cfgs['included'].hf_hub_id == loading.hub_id('net.included')
    assert not cfgs['other'].default.has_weights and cfgs['other'].default.classifier == 'head.fc'


def test_weights_of_ones_own_need_none_that_ship(tmp_path):
    model = timm.create_model('sa_quadratic_gen_cifar', embed_dim=8, depth=1)
    saving.save_weights(model, tmp_path / 'own.safetensors', dtype=torch.float32)
    for overlay in (dict(file=str(tmp_path / 'own.safetensors')), dict(state_dict=model.state_dict())):
        loaded = timm.create_model(
            'sa_quadratic_gen_cifar', pretrained=True, pretrained_cfg_overlay=overlay, embed_dim=8, depth=1)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('features_only', [False, True])
def test_files_of_the_package_load_as_files_and_other_sources_come_first(tmp_path, monkeypatch, features_only):
    name = 'resnet_tiny_cifar'
    model = timm.create_model(name, pretrained=True, features_only=features_only)
    wanted = load_file(weights.weights_path(name))
    loaded = {key.replace('model.', '', 1) if features_only else key: v for key, v in model.state_dict().items()}
    assert loaded and all(torch.equal(value, wanted[key].to(value.dtype)) for key, value in loaded.items())
    cfg = timm.get_pretrained_cfg(name)
    assert loading.weights_file(cfg) == weights.weights_path(name)
    for other in (dict(hf_hub_id='me/other'), dict(file='own.safetensors'), dict(source='hf-hub')):
        assert loading.weights_file(dataclasses.replace(cfg, **other)) is None
