"""Publishing and downloading with a Hub on this machine."""
import json
import re
import runpy

import pytest
import timm
import torch
from timm.models import save_for_hf

from hub_server import serve
from timm_selfconv.cli import main
from timm_selfconv.weights import WEIGHTS_DIR, loading, publishing

ONE = 'resnet_tiny_cifar'
CONTENT = (WEIGHTS_DIR / f'{ONE}.safetensors').read_bytes()
FILES = {'README.md', 'config.json', 'model.safetensors'}


@pytest.fixture
def hub(client, monkeypatch):
    with serve() as (hub, address):
        client(ENDPOINT=address)
        monkeypatch.setattr(publishing, 'HfApi', lambda: hub.api)
        yield hub


def tagged(hub):
    return hub.repos[f'org/{ONE}'][hub.tags[f'org/{ONE}', loading.REVISION]]


def test_publish_again_change_one(hub, refused):
    main(['publish', ONE, '--owner', 'org'])
    files = tagged(hub)
    assert {*files} == FILES and files['model.safetensors'] == CONTENT
    assert files['README.md'] == (WEIGHTS_DIR / f'{ONE}.md').read_bytes()
    assert not hub.api.create_repo.call_args.kwargs['private']
    hub.repos[f'org/{ONE}'][-1]['README.md'] = b'another'
    main(['publish', ONE, '--owner', 'org'])
    assert len(hub.repos[f'org/{ONE}']) == 2 and tagged(hub)['README.md'] != b'another'  # the tag follows
    main(['publish', ONE, '--owner', 'own', '--private'])
    assert hub.api.create_repo.call_args.kwargs['private'] and [*hub.repos] == [f'org/{ONE}', f'own/{ONE}']
    hub.api.repo_info.return_value.private = False
    refused(f'org/{ONE}: private=True, but the', ['publish', ONE, '--owner', 'org', '--private'])
    assert len(hub.repos[f'org/{ONE}']) == 2


@pytest.mark.parametrize('step', ['create_repo', 'create_tag'])
def test_a_failed_upload_is_one_line_and_can_be_repeated(hub, refused, step):
    method = getattr(hub.api, step)
    works, method.side_effect = method.side_effect, RuntimeError('log in')
    refused(f'org/{ONE}: log in', ['publish', ONE, '--owner', 'org'])
    assert not hub.tags
    method.side_effect = works
    main(['publish', ONE, '--owner', 'org'])
    assert tagged(hub)['model.safetensors'] == CONTENT


@pytest.mark.parametrize('card', [None, "# plain\n\nmodel = timm.create_model('local-dir:plain', pretrained=True)\n"])
def test_your_own_folder_is_published_and_read_from_the_hub(hub, small_net, images, tmp_path, card):
    net = small_net('sa_quadratic_cifar', num_classes=3).eval()
    save_for_hf(net, tmp_path / 'plain', model_config=dict(label_names=['a', 'b', 'c']), safe_serialization=True)
    for file in ('.lock', 'last.pth.tar', 'history.json'):  # files of a run
        (tmp_path / 'plain' / file).write_text('{}')
    if card is not None:
        (tmp_path / 'plain' / 'README.md').write_text(card)
    main(['publish', f"local-dir:{tmp_path / 'plain'}", '--owner', 'me'])
    files = hub.repos['me/plain'][-1]
    assert {*files} == FILES and not hub.tags
    assert "create_model('hf-hub:me/plain', pretrained=True)" in files['README.md'].decode()
    assert b'local-dir' not in files['README.md'] and json.loads(files['config.json'])['label_names'] == ['a', 'b', 'c']
    loaded = timm.create_model('hf-hub:me/plain', pretrained=True).eval()
    x = images(2, 3, 32, 32)
    torch.testing.assert_close(loaded(x), net(x), rtol=0, atol=0)


def test_missing_repositories_are_named(hub, refused):
    refused("model='hf-hub:me/nothing': cannot be loaded (hf-hub:me/nothing: no such repository on the Hub (404)",
            ['heads', 'hf-hub:me/nothing'])


@pytest.fixture
def light(tmp_path, monkeypatch):
    """The package without weight files, as on the package index."""
    monkeypatch.setattr(loading, 'weights_path', lambda name: tmp_path / 'nowhere')


def load(name=ONE, **kwargs):
    """Return 'loaded', or the error."""
    try:
        timm.create_model(name, pretrained=True, **kwargs)
    except (OSError, RuntimeError) as e:
        return str(e)
    return 'loaded'


def put(hub, content):
    hub.repos[f'timm-selfconv/{ONE}'] = [{'model.safetensors': content}]
    hub.tags[f'timm-selfconv/{ONE}', loading.REVISION] = 0


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')  # a second copy with another environment
def test_weights_come_from_the_hub_once(hub, light, client, monkeypatch, tmp_path):
    put(hub, CONTENT)
    assert load() == 'loaded' and any('resolve' in request for request in hub.requests)
    hub.requests.clear()
    assert load() == 'loaded' and not hub.requests
    assert load(cache_dir=tmp_path / 'other') == 'loaded' and [*(tmp_path / 'other').rglob('model.safetensors')]
    client(HF_HUB_OFFLINE=True)
    assert load() == 'loaded' and 'offline' in load('sa_learned_tiny_cifar')
    monkeypatch.setenv('TIMM_SELFCONV_HUB', 'org')
    assert runpy.run_module('timm_selfconv.weights.loading')['hub_id'](ONE) == f'org/{ONE}@{loading.REVISION}'


def test_weights_are_checked_as_they_arrive(hub, light):
    put(hub, CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    assert 'damaged or of another version' in load() and 'damaged or of another version' in load()
    put(hub, CONTENT)
    assert load() == 'loaded'


def test_a_failed_download_gives_the_reason(hub, light, client):
    assert load().startswith(f'timm-selfconv/{ONE}: no such repository on the Hub (404)')
    put(hub, b'not those')
    hub.status = 403
    assert re.match(f'timm-selfconv/{ONE}: 403', load())
    client(ENDPOINT='http://127.0.0.1:9')
    assert re.match('http://127.0.0.1:9 does not answer', load())
