"""Error messages of commands: one line on stderr for a mistake of the user."""
import json
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import timm
import torch

from pictures import fill
from timm_selfconv.cli import main

NET, BARE = 'sa_quadratic_tiny_cifar', 'sa_learned_content_hier_h16_cifar'  # with and without weights


@pytest.fixture(scope='module')
def broken_files(tmp_path_factory):
    """A folder with broken checkpoints, nets, runs and datasets."""
    folder, old = tmp_path_factory.mktemp('broken'), os.getcwd()
    os.chdir(folder)
    configs = dict(text='hello', damaged='{"architecture": "sa_quadratic_tiny_cifar"}')
    texts = {
        **dict.fromkeys(('text.pt', 'text.safetensors', 'runs/text/checkpoint-0.pth.tar'), 'hello'),
        'parquet/test-00000-of-00001.parquet': 'hello', 'runs/words/summary.csv': 'epoch,eval_top1\n0,many\n',
        **{f'nets/{name}/config.json': config for name, config in configs.items()},
        **{f'nets/{name}/model.safetensors': 'hello' for name in configs}}
    for file, text in texts.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    net = torch.nn.Linear(2, 2)
    lightning = {f'model.{name}': value for name, value in timm.create_model(NET).state_dict().items()}
    things = dict(module=net, other=net.state_dict(), lightning=dict(state_dict=lightning, epoch=3))
    for name, thing in things.items():
        Path('runs', name).mkdir()
        for file in (f'{name}.pt', f'runs/{name}/checkpoint-0.pth.tar'):
            torch.save(thing, file)
    Path('runs/nothing').mkdir()
    fill(Path('data', 'test'), ['cat'])
    fill(Path('own'), ['cat', 'dog'], count=2)
    os.chdir(old)
    return folder


@pytest.fixture
def broken(broken_files, monkeypatch):
    monkeypatch.chdir(broken_files)


HEADS, EVAL, FIGURES, PRUNE = (
    [command, NET, *output] for command, *output in (
        ['heads'], ['eval'], ['figures', '--out', 'out'], ['prune', '--output', 'out']))


@pytest.mark.parametrize('command,message', [
    (['heads', BARE], f'{BARE} has no trained weights'),
    *((command, ': nowhere.png: no such file') for command in (
        ['classify', NET, 'nowhere.png'], [*FIGURES, '--images', 'nowhere.png'],
        [*EVAL, '--checkpoint', 'nowhere.png', '--data', 'data'])),
    (['finetune', NET, 'nowhere', '--output', 'out'], "folder='nowhere': "),
    *((['finetune', net, 'own', *words, '--output', 'out'], message) for net, *words, message in (
        [BARE, 'has no trained weights yet'], [NET, 'nonsense=1', 'nonsense'],
        [NET, 'img_size=18', 'timm-selfconv: img_size=18: needs'])),
    (['heads', 'resnet18', '--untrained'], 'model=resnet18: has no attention maps; needs'),
    (['classify', NET, 'parquet'], "images=['parquet']: needs at least one picture"),
    ([*PRUNE, '--heads', '0:1;2'], "'0:1;2': needs LAYER:HEAD,HEAD"),
    ([*PRUNE, '--heads', '0:1', '0:2'], 'needs each layer once'),
    (['prune', 'sa_learned_tiny_cifar', '--output', 'out'], 'name the heads to prune'),
    *(([*HEADS, '--checkpoint', file], f'checkpoint={file!r}: cannot be loaded') for file in (
        'text.safetensors', 'module.pt')),
    ([*HEADS, '--checkpoint', '/dev/null'], '--checkpoint: /dev/null: needs a file'),
    ([*HEADS, '--checkpoint', 'lightning.pt'],
     "checkpoint='lightning.pt': cannot be loaded; all keys begin with 'model.'"),
    (['heads', 'local-dir:nets/nowhere'], 'MODEL: nets/nowhere/config.json: no such file'),
    *((['heads', f'local-dir:nets/{name}'], f"model='local-dir:nets/{name}': cannot be loaded") for name in (
        'text', 'damaged')),
    (['heads', 'hf-hub:nobody/nothing'], "model='hf-hub:nobody/nothing': cannot be loaded"),
    *(([*EVAL, '--data', data], f'data={data!r}') for data in (
        'hfds/nobody/nothing', 'text.pt')),
    ([*EVAL, '--data', 'runs/nothing'], "folder='runs/nothing': has no pictures"),
    ([*EVAL, '--data', 'parquet'], "data='hfds/parquet'"),
    ([*EVAL, '--data', 'data', '--device', 'meta'], "device='meta'"),
    ([*HEADS, '--kernel-size', '1000000000'], 'kernel_size=1000000000: needs a kernel that fits in a grid of 8 x 8'),
    ([*FIGURES, '--run', 'runs/text'], "run='runs/text': needs a net with a shipped history"),
    ([*FIGURES, '--run', 'sa_learned_tiny_cifar'],
     'sa_learned_tiny_cifar.history.json: belongs to the net sa_learned_tiny_cifar, not to sa_quadratic_tiny_cifar'),
    (['figures', 'san_pairwise_cifar', '--images', 'data/test/cat/0.png', '--out', 'out', '--run', 'run'],
     'run: vector attention has only footprints'),
    (['heads', 'sa_quadratic_cifar.cifar'], "available: ['sa_quadratic_cifar.cifar10', 'sa_quadratic_cifar.dist_cifar"),
    (['bench', 'gmlp_ti16_224', '--untrained', '--img-size', '100', '--batch-size', '1'],
     'img_size=100: MlpMixer does not accept it'),
    ([*FIGURES, '--curves', 'runs/words'], 'runs/words/summary.csv: needs numbers'),
    (['publish', 'resnet_tiny_cifar', '--owner', 'nobody'],
     'nobody/resnet_tiny_cifar: '),
], ids=lambda value: ' '.join(value) if isinstance(value, list) else '')
def test_a_mistake_ends_in_one_line(command, message, broken, refused, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('datasets.config.HF_HUB_OFFLINE', True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # as cli does before its imports
    refused(message, command)
    assert not os.path.lexists('out')


@pytest.mark.parametrize('silent, command', [
    (True, ['heads', 'hf-hub:nobody/nothing']),
    (False, ['heads', 'vit_tiny_patch16_224']),
    (False, ['eval', 'sa_quadratic_tiny_cifar', '--data', 'hfds/nobody/nothing']),
    (False, ['publish', 'resnet_tiny_cifar', '--owner', 'nobody']),
])
def test_a_hub_that_does_not_answer_is_asked_once(command, silent, broken, refused, monkeypatch):
    asked = []

    class Server(socketserver.BaseRequestHandler):
        def handle(self):
            asked.append(self)
            if silent:
                released.wait(60)

    released = threading.Event()
    with socketserver.ThreadingTCPServer(('127.0.0.1', 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', f'http://127.0.0.1:{server.server_address[1]}')
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT', 0.2)
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
        getattr(huggingface_hub.utils._http, 'reset_sessions', bool)()  # before 1.0 a session stays offline
        refused('does not answer', command)
        released.set()
        server.shutdown()
    assert len(asked) == 1


def test_a_net_without_its_weights_can_be_initialised(refused, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', mock.Mock(side_effect=FileNotFoundError('no')))
    refused("model='test_vit': cannot be loaded; --untrained initialises it", ['heads', 'test_vit'])


def test_a_bug_keeps_its_traceback(monkeypatch):
    def bug(*args, **kwargs):
        raise TypeError('a bug')

    monkeypatch.setattr('timm_selfconv.commands.use.report_heads', bug)
    with pytest.raises(TypeError, match='a bug'):
        main(['heads', 'sa_quadratic_tiny_cifar', '--untrained'])


@pytest.mark.slow
def test_libraries_print_nothing(little, named, tmp_path):
    commands = [
        ['list'], ['list', '--tables'], ['classify', little, f'{named}/test/cat/0.png'], ['heads', little],
        ['eval', little, '--data', named], ['figures', little, '--out', str(tmp_path / 'figures')],
        ['bench', little, '--batch-size', '1', '--seconds', '0.01'],
        ['include', little, 'sa_quadratic_gen_cifar', '--output', str(tmp_path / 'included')]]
    code = 'import json, sys; from timm_selfconv.cli import main\nfor command in json.loads(sys.argv[1]): main(command)'
    done = subprocess.run([sys.executable, '-c', code, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '' and 'top-1' in done.stdout


@pytest.mark.parametrize('command', [
    ['export', 'sa_quadratic_tiny_cifar', '--checkpoint', '{checkpoint}', '--data', '{data}', '--output', 'out'],
    ['explore', '{net}', '{data}/test/0/0.png', '--out', 'out/page.html'],
], ids=lambda command: command[0])
def test_a_file_size_limit_ends_in_one_line(command, little, checkpoint, folder, tmp_path, refused, monkeypatch, limit):
    monkeypatch.chdir(tmp_path)
    with limit(2_000):
        refused('File too large', [word.format(net=little, checkpoint=checkpoint, data=folder) for word in command])
    assert not [file for file in Path('out').rglob('*') if file.suffix in ('.safetensors', '.html', '.tmp')]


@pytest.mark.slow
def test_a_closed_pipe_prints_no_error():
    for command in (['list', '--json'], ['--help']):
        process = subprocess.Popen(
            [sys.executable, '-c', 'from timm_selfconv.cli import main; main()', *command], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()  # as head
        assert process.stderr.read() == '' and process.wait() in (0, 1)
