"""Weights load by name and tag, from the package before the Hub."""
import dataclasses
import socket
from unittest import mock

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import generate_default_cfgs

from timm_selfconv import weights
from timm_selfconv.models import _cfg, zoo_names
from timm_selfconv.weights import loading, saving


def test_every_net_loads_its_file_or_lists_alternatives(monkeypatch):
    monkeypatch.setattr(socket.socket, 'connect', mock.Mock(side_effect=AssertionError('looks in the network')))
    for name in zoo_names():
        if weights.weights_path(name).is_file():
            timm.create_model(name, pretrained=True)
            assert name in timm.list_models(pretrained=True, include_tags=False)
            assert timm.get_pretrained_cfg(name).license == 'apache-2.0'
        else:
            with pytest.raises(RuntimeError, match=f'{name} has no trained weights.*recipes/README.md'):
                timm.create_model(name, pretrained=True)
            assert not timm.is_model_pretrained(name)


def test_every_weight_file_is_a_tag_of_its_net(tmp_path, monkeypatch):
    """The default tag is cifar10, even without weights. timm would take the first tag with weights."""
    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)
    for stem in ('net', 'net.included', 'network', 'other.longer'):  # files on the Hub
        saving.record_checksum(tmp_path / f'{stem}.safetensors', '0' * 64)
    cfgs = generate_default_cfgs(_cfg.cifar_cfgs('net', 'other', classifier='head.fc'))
    assert [list(cfgs[name].tags) for name in ('net', 'other')] == [['cifar10', 'included'], ['cifar10', 'longer']]
    assert cfgs['net'].cfgs['included'].hf_hub_id == loading.hub_id('net.included')
    assert not cfgs['other'].default.has_weights and cfgs['other'].default.classifier == 'head.fc'


def test_your_own_weights_load_into_a_net_without_weights(tmp_path):
    model = timm.create_model('sa_quadratic_gen_cifar', embed_dim=8, depth=1)
    saving.save_weights(model, tmp_path / 'own.safetensors', dtype=torch.float32)
    for overlay in (dict(file=str(tmp_path / 'own.safetensors')), dict(state_dict=model.state_dict())):
        loaded = timm.create_model(
            'sa_quadratic_gen_cifar', pretrained=True, pretrained_cfg_overlay=overlay, embed_dim=8, depth=1)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('kwargs', [dict(), dict(features_only=True), dict(num_classes=5, in_chans=1)], ids=str)
def test_files_of_the_package_load_and_other_sources_come_first(tmp_path, kwargs):
    name = 'resnet_tiny_cifar'
    model, wanted = timm.create_model(name, pretrained=True, **kwargs), load_file(weights.weights_path(name))
    loaded = {key.removeprefix('model.'): v for key, v in model.state_dict().items()}
    same = [key for key, value in loaded.items() if torch.equal(value, wanted[key].to(value.dtype))]
    assert len(loaded) - len(same) == (3 if 'num_classes' in kwargs else 0)  # stem and head
    cfg = timm.get_pretrained_cfg(name)
    assert loading.weights_file(cfg) == weights.weights_path(name)
    for other in (dict(hf_hub_id='me/other'), dict(file='own.safetensors'), dict(source='hf-hub')):
        assert loading.weights_file(dataclasses.replace(cfg, **other)) is None
