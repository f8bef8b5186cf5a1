import shutil
import socket
from pathlib import Path

import pytest
import timm
import torch
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
        assert timm.create_model(name, pretrained=True, num_classes=5, in_chans=1).num_classes == 5
        assert name in timm.list_models(pretrained=True, include_tags=False)
        assert timm.get_pretrained_cfg(name).license == 'apache-2.0'
    else:
        with pytest.raises(RuntimeError, match=rf'{name} has no trained weights.*recipes/README.md.*pretrained_cfg'):
            timm.create_model(name, pretrained=True)
        assert not timm.is_model_pretrained(name)


@pytest.mark.parametrize('tag', ['', '.cifar10'])
def test_weights_that_did_not_learn_from_labels_only_load_by_tag(tag):
    name = 'sa_quadratic_gen_pruned_cifar'
    with pytest.raises(RuntimeError, match=rf"no trained .* others by tag: '{name}\.from_.*' \(begun in .*taught by"):
        timm.create_model(f'{name}{tag}', pretrained=True)
    assert timm.list_models(f'{name}*', pretrained=True) == [f'{name}.from_quadratic_cifar10']
    assert not timm.list_models(f'{name}*', pretrained=True, include_tags=False)
    assert not timm.is_model_pretrained(name) and timm.is_model_pretrained(f'{name}.from_quadratic_cifar10')


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


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A weight file of the package, to be damaged."""
    file = tmp_path / 'net.safetensors'
    shutil.copyfile(weights.weights_path('resnet_tiny_cifar'), file)
    monkeypatch.setattr(loading, 'weights_path', lambda name: file)
    return file


def test_a_bit_that_flips_between_two_loads_is_noticed(shipped):
    timm.create_model('resnet_tiny_cifar', pretrained=True)
    content = bytearray(shipped.read_bytes())
    content[len(content) // 2] ^= 1
    shipped.write_bytes(content)
    with pytest.raises(RuntimeError, match=r'resnet_tiny_cifar: .* damaged or of another version .* install .* anew'):
        timm.create_model('resnet_tiny_cifar', pretrained=True)


@pytest.mark.parametrize('features_only', [False, True])
def test_the_bytes_that_are_checked_are_those_that_are_loaded(shipped, monkeypatch, features_only):
    wanted = timm.create_model('resnet_tiny_cifar', pretrained=True, features_only=features_only)

    def read_and_damage(path):
        content = read(path)
        if path == shipped:
            path.write_bytes(b'other')
        return content

    read = Path.read_bytes
    monkeypatch.setattr(Path, 'read_bytes', read_and_damage)
    model = timm.create_model('resnet_tiny_cifar', pretrained=True, features_only=features_only)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    for module in model.modules():  # no second copy of the weights
        assert 'state_dict' not in getattr(module, 'pretrained_cfg', {})
