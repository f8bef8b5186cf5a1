"""The zoo on a Hub: the real huggingface_hub client, in fresh processes, against a server on this machine."""
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import timm
from PIL import Image

import timm_selfconv
from hub_server import TOKEN, serve
from timm_selfconv.weights import WEIGHTS_DIR
from timm_selfconv.weights.loading import REVISION
from warm import WarmPython

ONE, DRAWN = NETS = ['resnet_tiny_cifar', 'sa_learned_content_hier_tiny_cifar']  # the first has no figures: quick


@pytest.fixture(scope='module')
def server():
    with serve() as hub:
        yield hub


@pytest.fixture
def hub(server):
    server.clear()
    return server


@pytest.fixture(scope='module')
def environment(server, tmp_path_factory):
    environment = dict(
        os.environ, HF_ENDPOINT=server.address, HF_HOME=str(tmp_path_factory.mktemp('cache')), HF_TOKEN=TOKEN,
        HF_HUB_DISABLE_XET='1', HF_HUB_DISABLE_TELEMETRY='1', HF_HUB_ETAG_TIMEOUT='1', TIMM_SELFCONV_HUB='org',
        HF_HUB_DOWNLOAD_TIMEOUT='5')
    environment.pop('HF_HUB_OFFLINE', None)
    return environment


@pytest.fixture(scope='module')
def command(tmp_path_factory):
    picture = tmp_path_factory.mktemp('picture') / 'red.png'
    Image.new('RGB', (40, 40), 'red').save(picture)
    return lambda *arguments: ['-m', 'timm_selfconv', 'publish', *arguments, '--images', str(picture)]


@pytest.fixture(scope='module')
def publish(environment, command):
    with WarmPython(environment, 'timm_selfconv.look.repository') as python:
        yield lambda *arguments: python.run(*command(*arguments))


def sent(hub):
    """How many requests changed something, by kind."""
    kinds = {'commit/': 'commits', 'PUT': 'uploads', '/tag/': 'tags', 'repos/create': 'repositories'}
    return Counter(kind for request in hub.requests for mark, kind in kinds.items() if mark in request)


def test_publish_again_change_one(hub, publish):
    first = publish(*NETS, '--owner', 'org')
    assert first.returncode == 0, first.stderr
    assert sent(hub) == dict(commits=2, uploads=2, tags=2, repositories=2)
    for name in NETS:
        files = hub.files(f'org/{name}', REVISION)
        assert files['model.safetensors'] == (WEIGHTS_DIR / f'{name}.safetensors').read_bytes()
        card = files['README.md'].decode()
        assert card.index('import timm_selfconv') < card.index('create_model') and 'bibtex' in card
        assert ('explorer.html' in files) == (name == DRAWN) and TOKEN not in str(files)

    hub.requests.clear()
    again = publish(*NETS, '--owner', 'org')
    assert again.returncode == 0 and again.stdout.count('nothing new') == 2
    assert set(sent(hub)) == {'repositories'}

    hub.repos[f'org/{ONE}'][-1]['README.md'] = b'another'
    changed = publish(ONE, '--owner', 'org')
    assert changed.returncode == 0 and sent(hub)['commits'] == 1 and not sent(hub)['uploads']
    assert hub.files(f'org/{ONE}', REVISION)['README.md'] != b'another'


def test_a_killed_publication_goes_on(hub, environment, command, publish):
    process = subprocess.Popen(
        [sys.executable, *command(ONE, '--owner', 'org')], env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    while not hub.objects and process.poll() is None:
        time.sleep(.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(hub.repos[f'org/{ONE}']) <= 2
    done = publish(ONE, '--owner', 'org')
    assert done.returncode == 0, done.stderr
    assert REVISION in {tag for _, tag in hub.tags} and sent(hub)['uploads'] == 1


@pytest.mark.parametrize('fault,status', [
    ('POST /api/repos/create', 401), ('POST .*/preupload', 403), ('POST .*/commit', 409), ('POST .*/batch', 429),
    ('GET .*/refs', 500),
    ('GET /org/.*/resolve', 'cut'),
])
def test_what_goes_wrong_on_the_hub_is_one_line(hub, publish, fault, status):
    hub.faults[fault] = status
    done = publish(ONE, '--owner', 'org')
    assert done.returncode == 2 and ONE in done.stderr and TOKEN not in done.stdout + done.stderr


def test_the_zoo_as_folders(tmp_path, publish):
    done = publish(ONE, '--folder', str(tmp_path / 'zoo'))
    assert done.returncode == 0, done.stderr
    timm.create_model(f'local-dir:{tmp_path}/zoo/{ONE}', pretrained=True)
    again = publish(ONE, '--folder', str(tmp_path / 'zoo'))
    assert again.returncode == 2 and 'exists' in again.stderr


@pytest.fixture
def light(tmp_path, environment):
    """The package without weight files, as the index has it, and an empty cache: they come from the Hub."""
    package = tmp_path / 'site' / 'timm_selfconv'
    shutil.copytree(os.path.dirname(timm_selfconv.__file__), package, ignore=shutil.ignore_patterns('*.safetensors'))
    return dict(environment, PYTHONPATH=str(package.parent), HF_HOME=str(tmp_path / 'cache'))


def load(environment, *names, **more):
    """What comes of nets, one after the other in one process: 'loaded', or how long it took and why not."""
    code = f"""
import time, timm, timm_selfconv
for name in {names}:
    start = time.monotonic()
    try:
        timm.create_model(name, pretrained=True)
        print('loaded')
    except RuntimeError as e:
        print(time.monotonic() - start, e)
"""
    done = subprocess.run(
        [sys.executable, '-c', code], env=dict(environment, **more), cwd=os.path.dirname(environment['HF_HOME']),
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_weights_come_from_the_hub_once(hub, light, publish):
    assert publish(ONE, '--owner', 'org').returncode == 0
    hub.requests.clear()
    assert load(light, ONE, f'hf-hub:org/{ONE}') == ['loaded'] * 2
    assert any('resolve' in request for request in hub.requests)
    hub.requests.clear()
    assert load(light, ONE) == ['loaded'] and not hub.requests
    assert load(light, ONE, HF_HUB_OFFLINE='1') == ['loaded']


def test_a_damaged_download_is_replaced(hub, light, publish):
    assert publish(ONE, '--owner', 'org').returncode == 0
    assert load(light, ONE) == ['loaded']
    blob, = (path for path in Path(light['HF_HOME']).rglob('blobs/*') if path.stat().st_size > 1e6)
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + b'x')
    assert 'damaged in the cache' in load(light, ONE, HF_HUB_OFFLINE='1')[0]
    assert load(light, ONE) == ['loaded'] and blob.read_bytes() == content
    hub.requests.clear()
    assert load(light, ONE) == ['loaded'] and not hub.requests


@pytest.mark.parametrize('etag', ['../../../../escaped', '..'])
def test_a_hub_that_names_files_elsewhere_writes_nowhere(hub, light, tmp_path, etag):
    hub.repos[f'org/{ONE}'] = [{'model.safetensors': b'hostile'}]
    hub.tags[f'org/{ONE}', REVISION] = 0
    hub.etags[f'org/{ONE}'] = etag
    said, = load(light, ONE)
    assert 'cannot be downloaded' in said and 'is no name of a file' in said
    assert not [path for path in tmp_path.rglob('*') if path.is_file() and path.read_bytes() == b'hostile']
    assert not any('escaped' in path.name for path in [*tmp_path.rglob('*'), *tmp_path.parent.iterdir()])


def test_weights_that_cannot_be_had_say_why(hub, light):
    hub.faults[f'HEAD .*{DRAWN}'] = 500
    hub.repos['org/sa_quadratic_tiny_cifar'] = [{'model.safetensors': b'not those'}]
    hub.tags['org/sa_quadratic_tiny_cifar', REVISION] = 0
    missing, failing, other = load(light, *NETS, 'sa_quadratic_tiny_cifar')
    assert 'is not there or not for you' in missing and 'answers 500' in failing
    assert 'damaged or of another version' in other
    assert 'HF_HUB_OFFLINE forbids' in load(light, ONE, HF_HUB_OFFLINE='1')[0]
    seconds, said = load(light, ONE, HF_ENDPOINT='http://127.0.0.1:9')[0].split(' ', 1)
    assert 'cannot be downloaded from http://127.0.0.1:9' in said and float(seconds) < 20
