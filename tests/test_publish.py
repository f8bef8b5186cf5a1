"""The zoo on a Hub: the real huggingface_hub client, in fresh processes, against a server on this machine."""
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from PIL import Image

import timm_selfconv
from hub_server import TOKEN, serve
from timm_selfconv.models._weights import REVISION
from timm_selfconv.weights import WEIGHTS_DIR

ONE, DRAWN = NETS = ['resnet_tiny_cifar', 'sa_learned_content_hier_tiny_cifar']  # the first has no figures: quick


@pytest.fixture
def hub():
    with serve() as hub:
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    environment = dict(
        os.environ, HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / 'cache'), HF_TOKEN=TOKEN,
        HF_HUB_DISABLE_XET='1', HF_HUB_DISABLE_TELEMETRY='1', HF_HUB_ETAG_TIMEOUT='1', TIMM_SELFCONV_HUB='org',
        HF_HUB_DOWNLOAD_TIMEOUT='5')
    environment.pop('HF_HUB_OFFLINE', None)
    return environment


@pytest.fixture
def picture(tmp_path):
    Image.new('RGB', (40, 40), 'red').save(tmp_path / 'red.png')
    return str(tmp_path / 'red.png')


def publish(environment, picture, *arguments):
    command = [sys.executable, '-m', 'timm_selfconv', 'publish', *arguments, '--images', picture]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def sent(hub):
    """How many requests changed something, by kind."""
    kinds = {'commit/': 'commits', 'PUT': 'uploads', '/tag/': 'tags', '/items': 'items', 'repos/create': 'repositories'}
    return Counter(kind for request in hub.requests for mark, kind in kinds.items() if mark in request)


def test_publish_again_change_one(hub, environment, picture):
    first = publish(environment, picture, *NETS, '--owner', 'org')
    assert first.returncode == 0, first.stderr
    assert sent(hub) == dict(commits=2, uploads=2, tags=2, items=2, repositories=2)
    for name in NETS:
        files = hub.files(f'org/{name}', REVISION)
        assert files['model.safetensors'] == (WEIGHTS_DIR / f'{name}.safetensors').read_bytes()
        card = files['README.md'].decode()
        assert card.index('import timm_selfconv') < card.index('create_model') and 'bibtex' in card
        assert ('explorer.html' in files) == (name == DRAWN) and TOKEN not in str(files)
    assert hub.collections['org/timm_selfconv-1'][2] == [f'org/{name}' for name in NETS]

    hub.requests.clear()
    again = publish(environment, picture, *NETS, '--owner', 'org')
    assert again.returncode == 0 and again.stdout.count('nothing new') == 2 and not sent(hub)

    hub.repos[f'org/{ONE}'][-1]['README.md'] = b'another'
    dry = publish(environment, picture, *NETS, '--owner', 'org', '--dry-run')
    assert f'org/{ONE}: README.md\n' in dry.stdout and not sent(hub)
    changed = publish(environment, picture, *NETS, '--owner', 'org')
    assert changed.returncode == 0 and sent(hub)['commits'] == 1 and not sent(hub)['uploads']
    assert hub.files(f'org/{ONE}', REVISION)['README.md'] != b'another'


def test_a_killed_publication_goes_on(hub, environment, picture):
    command = [sys.executable, '-m', 'timm_selfconv', 'publish', ONE, '--owner', 'org', '--images', picture]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not hub.objects and process.poll() is None:
        time.sleep(.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(hub.repos[f'org/{ONE}']) <= 2
    done = publish(environment, picture, ONE, '--owner', 'org')
    assert done.returncode == 0, done.stderr
    assert REVISION in {tag for _, tag in hub.tags} and sent(hub)['uploads'] == 1


@pytest.mark.parametrize('fault,status', [
    ('POST /api/repos/create', 401), ('POST .*/preupload', 403), ('POST .*/commit', 409), ('GET .*/refs', 500),
    ('GET /org/.*/resolve', 'cut'),
])
def test_what_goes_wrong_on_the_hub_is_one_line(hub, environment, picture, fault, status):
    hub.faults[fault] = status
    done = publish(environment, picture, ONE, '--owner', 'org')
    assert done.returncode == 2 and ONE in done.stderr and TOKEN not in done.stdout + done.stderr


def test_the_zoo_as_folders(tmp_path, environment, picture):
    done = publish(environment, picture, ONE, '--folder', str(tmp_path / 'zoo'))
    assert done.returncode == 0, done.stderr
    code = f'import timm, timm_selfconv; timm.create_model("local-dir:{tmp_path}/zoo/{ONE}", pretrained=True)'
    assert subprocess.run([sys.executable, '-c', code], env=environment).returncode == 0
    again = publish(environment, picture, ONE, '--folder', str(tmp_path / 'zoo'))
    assert again.returncode == 2 and 'exists' in again.stderr


@pytest.fixture
def light(tmp_path, environment):
    """The package without weight files, as the index has it: they come from the Hub."""
    package = tmp_path / 'site' / 'timm_selfconv'
    shutil.copytree(os.path.dirname(timm_selfconv.__file__), package, ignore=shutil.ignore_patterns('*.safetensors'))
    environment['PYTHONPATH'] = str(package.parent)
    return environment


def load(environment, name=ONE, **more):
    code = f"""
import time, timm, timm_selfconv
start = time.monotonic()
try:
    timm.create_model({name!r}, pretrained=True)
    print('loaded')
except RuntimeError as e:
    print(time.monotonic() - start, e)
"""
    done = subprocess.run(
        [sys.executable, '-c', code], env=dict(environment, **more), cwd=os.path.dirname(environment['HF_HOME']),
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_weights_come_from_the_hub_once(hub, light, picture):
    assert publish(dict(light, PYTHONPATH=os.pathsep.join(sys.path)), picture, ONE, '--owner', 'org').returncode == 0
    hub.requests.clear()
    assert load(light) == 'loaded' and any('resolve' in request for request in hub.requests)
    hub.requests.clear()
    assert load(light) == 'loaded' and not hub.requests
    assert load(light, HF_HUB_OFFLINE='1') == 'loaded'
    assert load(light, f'hf-hub:org/{ONE}') == 'loaded'


def test_weights_that_cannot_be_had_say_why(hub, light, tmp_path):
    said = load(light)
    assert 'is not there or not for you' in said and len(said.splitlines()) == 1
    hub.faults['HEAD'] = 500
    assert 'answers 500' in load(light)
    assert 'HF_HUB_OFFLINE forbids' in load(light, HF_HUB_OFFLINE='1')
    seconds, said = load(light, HF_ENDPOINT='http://127.0.0.1:9').split(' ', 1)
    assert 'cannot be downloaded from http://127.0.0.1:9' in said and float(seconds) < 20


def test_other_bytes_are_refused(hub, light):
    hub.repos[f'org/{ONE}'] = [{'model.safetensors': b'not those'}]
    hub.tags[f'org/{ONE}', REVISION] = 0
    assert 'damaged or of another version' in load(light)
