"""The zoo on a Hub: the real huggingface_hub client, against a server on this machine."""
import re
import runpy
import time
from collections import Counter

import huggingface_hub
import pytest
import timm
from PIL import Image

from hub_server import TOKEN, serve
from timm_selfconv.cli import main
from timm_selfconv.weights import WEIGHTS_DIR, loading
from timm_selfconv.weights.loading import REVISION

ONE, DRAWN = NETS = ['resnet_tiny_cifar', 'sa_learned_content_hier_tiny_cifar']  # the first has no figures: quick


@pytest.fixture(scope='module')
def server():
    with serve() as hub:
        yield hub


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Changes constants of the client, which reads them from the environment when it is imported."""
    def change(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
        if 'ENDPOINT' in constants:
            change(HUGGINGFACE_CO_URL_TEMPLATE=constants['ENDPOINT'] + '/{repo_id}/resolve/{revision}/{filename}')
        getattr(huggingface_hub.utils._http, 'reset_sessions', bool)()  # before 1.0 a session stays offline

    change(HF_HUB_CACHE=str(tmp_path / 'cache'), HF_HUB_OFFLINE=False, HF_HUB_ETAG_TIMEOUT=1, HF_HUB_DOWNLOAD_TIMEOUT=5)
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    return change


@pytest.fixture
def hub(server, client):
    server.clear()
    client(ENDPOINT=server.address)
    return server


@pytest.fixture
def publish(tmp_path):
    files = [tmp_path / folder / 'red.png' for folder in ('a', 'b')]
    for file in files:
        file.parent.mkdir()
        Image.new('RGB', (40, 40), 'red').save(file)
    return lambda *words: main(['publish', *words, '--images', *map(str, files)])


def sent(hub):
    """How many requests changed something, by kind."""
    kinds = {'/commit/': 'commits', '/tag/': 'tags', 'repos/create': 'repositories'}
    return Counter(kind for request in hub.requests for mark, kind in kinds.items() if mark in request)


def tagged(hub, name, owner='org'):
    return hub.repos[f'{owner}/{name}'][hub.tags[f'{owner}/{name}', REVISION]]


def test_publish_again_change_one(hub, publish, capsys):
    publish(ONE, '--owner', 'org')
    assert sent(hub) == dict(commits=1, tags=1, repositories=1)
    assert not hub.private
    files = tagged(hub, ONE)
    assert files['model.safetensors'] == (WEIGHTS_DIR / f'{ONE}.safetensors').read_bytes()
    assert TOKEN not in str(files)

    hub.requests.clear()
    capsys.readouterr()
    publish(ONE, '--owner', 'org')
    assert 'nothing new' in capsys.readouterr().out and set(sent(hub)) == {'repositories'}

    hub.repos[f'org/{ONE}'][-1]['README.md'] = b'another'
    publish(ONE, '--owner', 'org')
    assert sent(hub)['commits'] == 1 and len(hub.repos[f'org/{ONE}']) == 3
    assert tagged(hub, ONE)['README.md'] != b'another'
    publish(ONE, '--owner', 'own', '--private')
    assert hub.private == {f'own/{ONE}'}


@pytest.mark.parametrize('fault,status', [
    ('POST /api/repos/create', 401), ('POST .*/preupload', 403), ('POST .*/commit', 409), ('GET .*/refs', 500),
    ('GET /org/.*/resolve', 'cut'), ('GET /org/.*/resolve/.*/README', 'flipped'), ('POST .*/tag', 429),
])
def test_what_goes_wrong_on_the_hub_is_one_line_and_the_next_time_goes_on(hub, publish, capsys, fault, status):
    hub.faults[fault] = status
    with pytest.raises(SystemExit) as stopped:
        publish(ONE, '--owner', 'org')
    said = capsys.readouterr()
    assert stopped.value.code == 2 and f'org/{ONE}: ' in said.err and TOKEN not in said.out + said.err
    assert not hub.tags
    hub.faults.clear()
    publish(ONE, '--owner', 'org')
    assert tagged(hub, ONE)['model.safetensors'] == (WEIGHTS_DIR / f'{ONE}.safetensors').read_bytes()
    assert len(hub.repos[f'org/{ONE}']) == 2  # what had arrived is not sent twice


@pytest.mark.slow
def test_the_zoo_as_folders(tmp_path, publish, refused):
    publish(*NETS, '--folder', str(tmp_path / 'zoo'))
    for name in NETS:
        folder = tmp_path / 'zoo' / name
        timm.create_model(f'local-dir:{folder}', pretrained=True)
        card = (folder / 'README.md').read_text()
        assert card.index('import timm_selfconv') < card.index('create_model') and 'bibtex' in card
        assert (folder / 'explorer.html').is_file() == (name == DRAWN)
    assert '"red (2)"' in (tmp_path / 'zoo' / DRAWN / 'explorer.html').read_text()
    refused('exists', ['publish', ONE, '--folder', tmp_path / 'zoo', '--images', tmp_path / 'a' / 'red.png'])


@pytest.fixture
def light(tmp_path, monkeypatch):
    """The package without weight files, as the index has it."""
    monkeypatch.setattr(loading, 'weights_path', lambda name: tmp_path / 'nowhere')


def load(name):
    """'loaded', or why not."""
    try:
        timm.create_model(name, pretrained=True)
    except RuntimeError as e:
        return str(e)
    return 'loaded'


def put(hub, name, content):
    hub.repos[f'timm-selfconv/{name}'] = [{'model.safetensors': content}]
    hub.tags[f'timm-selfconv/{name}', REVISION] = 0


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')  # a second copy, of another environment
def test_weights_come_from_the_hub_once(hub, publish, client, request, monkeypatch):
    publish(ONE, '--owner', 'timm-selfconv')
    request.getfixturevalue('light')
    hub.requests.clear()
    assert load(ONE) == load(f'hf-hub:timm-selfconv/{ONE}') == 'loaded'
    assert any('resolve' in request for request in hub.requests)
    hub.requests.clear()
    assert load(ONE) == 'loaded'
    client(HF_HUB_OFFLINE=True)
    assert load(ONE) == 'loaded' and not hub.requests
    monkeypatch.setenv('TIMM_SELFCONV_HUB', 'org')
    assert runpy.run_module('timm_selfconv.weights.loading')['hub_id'](ONE) == f'org/{ONE}@{REVISION}'


def test_a_damaged_download_is_replaced(hub, light, client, tmp_path):
    content = (WEIGHTS_DIR / f'{ONE}.safetensors').read_bytes()
    put(hub, ONE, content)
    assert load(ONE) == 'loaded'
    blob, = (tmp_path / 'cache').rglob('blobs/*')
    blob.write_bytes(content[:-1] + b'x')
    client(HF_HUB_OFFLINE=True)
    assert 'damaged in the cache' in load(ONE)
    client(HF_HUB_OFFLINE=False)
    assert load(ONE) == 'loaded' and blob.read_bytes() == content
    hub.requests.clear()
    assert load(ONE) == 'loaded' and not hub.requests


@pytest.mark.parametrize('etag', ['../../../../escaped', '..'])
def test_a_hub_that_names_files_elsewhere_writes_nowhere(hub, light, tmp_path, etag):
    put(hub, ONE, b'hostile')
    hub.etags[f'timm-selfconv/{ONE}'] = etag
    assert re.search('cannot be downloaded.*is no name of a file', load(ONE))
    assert not [path for path in tmp_path.rglob('*') if path.is_file() and path.read_bytes() == b'hostile']
    assert not any('escaped' in path.name for path in [*tmp_path.rglob('*'), *tmp_path.parent.iterdir()])


def test_weights_that_cannot_be_had_say_why(hub, light, client):
    assert re.search(r'cannot be downloaded.*\(404 .*log in', load(ONE), re.DOTALL)
    hub.faults[f'HEAD .*{DRAWN}'] = 500
    assert re.search(r'cannot be downloaded.*\b500\b', load(DRAWN))
    put(hub, ONE, b'not those')
    assert 'damaged or of another version' in load(ONE)
    client(HF_HUB_OFFLINE=True)
    assert 'HF_HUB_OFFLINE forbids' in load(DRAWN)
    client(HF_HUB_OFFLINE=False, ENDPOINT='http://127.0.0.1:9')
    start = time.monotonic()
    assert 'cannot be downloaded from http://127.0.0.1:9' in load(DRAWN) and time.monotonic() - start < 20
