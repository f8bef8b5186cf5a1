"""Messages of commands on stderr: one line for a mistake of the user, else nothing."""
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
from timm.models import save_for_hf

from pictures import fill
from timm_selfconv.cli import main

NET = 'sa_quadratic_tiny_cifar'


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder of files and folders that hold something else than their names say."""
    monkeypatch.chdir(tmp_path)
    model = '"architecture": "sa_quadratic_tiny_cifar"'
    configs = dict(
        text='hello', list='[]', unknown='{"architecture": "nowhere"}', damaged=f'{{{model}}}',
        wrong=f'{{{model}, "model_args": {{"nowhere": 3}}, "pretrained_cfg": {{}}}}')
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
    things = dict(tensor=torch.zeros(3), module=net, other=net.state_dict(), state=dict(state_dict=3),
                  lightning=dict(state_dict=lightning, epoch=3))
    for name, thing in things.items():
        Path('runs', name).mkdir()
        for file in (f'{name}.pt', f'runs/{name}/checkpoint-0.pth.tar'):
            torch.save(thing, file)
    for folder in ('runs/nothing', 'runs/folder/checkpoint-0.pth.tar'):
        Path(folder).mkdir(parents=True)
    for key, value in dict(interpolation='x', label_names=5).items():
        model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8, depth=1, pretrained_cfg_overlay={key: value})
        save_for_hf(model, f'nets/{key}', safe_serialization=True)
    fill(Path('data', 'test'), ['cat'])
    fill(Path('own'), ['cat', 'dog'], count=2)


HEADS, EVAL, FIGURES, PRUNE = (
    [command, NET, *output] for command, *output in (
        ['heads'], ['eval'], ['figures', '--out', 'out'], ['prune', '--output', 'out']))


@pytest.mark.parametrize('command,message', [
    (['heads', 'resvit_cifar'], 'resvit_cifar has no trained weights'),
    (['eval', 'resnet_tiny_cifar', '--data', 'data', '--fuse'], 'has no SelfAttention2d layers to fuse'),
    *((command, ': nowhere.png: no such file') for command in (
        ['classify', NET, 'nowhere.png'], [*HEADS, '--images', 'nowhere.png'], [*FIGURES, '--images', 'nowhere.png'],
        ['explore', NET, 'nowhere.png', '--out', 'out'], ['theorem', 'nowhere.png', '--out', 'out'],
        [*EVAL, '--checkpoint', 'nowhere.png', '--data', 'data'], ['run', 'nowhere.png'],
        ['export', NET, '--checkpoint', 'nowhere.png', '--data', 'data', '--output', 'out'],
        ['finetune', NET, 'data/test', '--checkpoint', 'nowhere.png', '--output', 'out'])),
    (['finetune', NET, 'nowhere', '--output', 'out'], "folder='nowhere': "),
    *((['finetune', net, 'own', *words, '--output', 'out'], message) for net, *words, message in (
        ['sa_quadratic_h16_cifar', 'has no trained weights yet'], [NET, 'nonsense=1', 'nonsense'],
        [NET, '--img-size', '18', 'timm-selfconv: img_size=18: needs'])),
    (['heads', 'resnet18', '--untrained'], 'model=resnet18: has no attention maps; needs'),
    (['classify', NET, 'parquet'], "images=['parquet']: no pictures there"),
    ([*PRUNE, '--heads', '0:1;2'], "'0:1;2': needs LAYER:HEAD,HEAD"),
    ([*PRUNE, '--heads', '0:1', '0:2'], 'needs each layer once'),
    ([*PRUNE, '--keep', '6', '--data', '.', '--count', '0'], "--count: '0': needs a whole number above 0"),
    (['prune', 'sa_learned_tiny_cifar', '--output', 'out'], 'name the heads to prune'),
    *(([*HEADS, '--checkpoint', file], f'checkpoint={file!r}: cannot be loaded') for file in (
        'text.pt', 'text.safetensors', 'tensor.pt', 'module.pt', 'other.pt', 'state.pt')),
    *(([*HEADS, '--checkpoint', file], f'--checkpoint: {file}: needs a file') for file in ('', '/dev/null')),
    ([*HEADS, '--checkpoint', 'lightning.pt'],
     "checkpoint='lightning.pt': cannot be loaded, all of its keys begin with 'model.'"),
    (['export', 'sa_quadratic_tiny_cifar', '--checkpoint', 'tensor.pt', '--data', 'data', '--output', 'out'],
     "checkpoint='tensor.pt': cannot be loaded"),
    (['heads', 'local-dir:nets/nowhere'], 'MODEL: nets/nowhere/config.json: no such file'),
    *((['heads', f'local-dir:nets/{name}'], f"model='local-dir:nets/{name}': cannot be loaded") for name in (
        'text', 'list', 'unknown', 'damaged', 'wrong')),
    *((['heads', name], f'model={name!r}: cannot be loaded') for name in (
        'hf-hub:nobody/nothing', ':')),
    *(([*EVAL, '--data', data], f'data={data!r}') for data in (
        'hfds/nobody/nothing', 'hfds/', 'torch/nothing', 'wds/nothing', '', 'text.pt')),
    *(([command, f'local-dir:nets/{key}', *data], key) for key in ('interpolation', 'label_names')
      for command, *data in (('classify', 'data/test/cat/0.png'), ('eval', '--data', 'data'))),
    ([*EVAL, '--data', 'runs/nothing'], "folder='runs/nothing': has no pictures"),
    ([*EVAL, '--data', 'parquet'], "data='hfds/parquet'"),
    *(([*EVAL, '--data', 'data', '--device', device], f'device={device!r}') for device in ('abacus', 'meta', '')),
    ([*HEADS, '--kernel-size', '1000000000'], 'kernel_size=1000000000: needs a kernel that fits in a grid of 8 x 8'),
    ([*FIGURES, '--data', 'hfds/nobody/nothing'], "data='hfds/nobody/nothing'"),
    *(([*FIGURES, '--run', f'runs/{name}'], f"run='runs/{name}': checkpoint-0.pth.tar is no checkpoint")
      for name in ('text', 'tensor', 'other', 'folder')),
    ([*FIGURES, '--run', ''], "run=''"),
    ([*FIGURES, '--run', 'sa_learned_tiny_cifar'],
     'sa_learned_tiny_cifar.history.json: is of another net, sa_learned_tiny_cifar, than sa_quadratic_tiny_cifar'),
    *((['figures', 'san_pairwise_cifar', '--images', 'data/test/cat/0.png', '--out', 'out', *words],
       f'{words[0][2:]}: not for vector attention') for words in (
        ['--run', 'run'], ['--query', '1', '1'], ['--part', 'position'], ['--versus', 'sa_quadratic_tiny_cifar'])),
    ([*FIGURES, '--data', 'data', '--count', 'x'], "--count: 'x': needs a whole number above 0"),
    (['heads', 'sa_quadratic_cifar.cifar'], "there are ['sa_quadratic_cifar.cifar10', 'sa_quadratic_cifar.dist_cifar"),
    (['bench', 'gmlp_ti16_224', '--untrained', '--img-size', '100', '--batch-size', '1'],
     'img_size=100: MlpMixer does not take it'),
    ([*FIGURES, '--curves', 'runs/words'], 'runs/words/summary.csv: needs numbers'),
    ([*EVAL, '--data', 'data', '--class-map', 'nowhere'], ': nowhere: no such file'),
    (['publish', 'resnet_tiny_cifar', '--owner', 'nobody'],
     'nobody/resnet_tiny_cifar: '),
    ([*PRUNE, '--min-eigenvalue', 'nan'], 'min_eigenvalue=nan'),
], ids=lambda value: ' '.join(value) if isinstance(value, list) else '')
def test_what_is_wrong_ends_in_one_line(command, message, broken, refused, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('datasets.config.HF_HUB_OFFLINE', True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # as cli says before its first import
    refused(message, command)
    assert not os.path.lexists('out')


@pytest.mark.parametrize('silent', [True, False])
@pytest.mark.parametrize('command', [
    ['heads', 'hf-hub:nobody/nothing'],
    ['heads', 'vit_tiny_patch16_224'],
    ['eval', 'sa_quadratic_tiny_cifar', '--data', 'hfds/nobody/nothing'],
    ['publish', 'resnet_tiny_cifar', '--owner', 'nobody'],
], ids=' '.join)
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


def test_weights_that_cannot_be_had_are_no_need(refused, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', mock.Mock(side_effect=FileNotFoundError('no')))
    refused("model='test_vit': cannot be loaded; --untrained takes it", ['heads', 'test_vit'])


def test_only_what_the_user_did_wrong_loses_its_traceback(monkeypatch):
    def bug(*args, **kwargs):
        raise TypeError('a bug')

    monkeypatch.setattr('timm_selfconv.commands.use.report_heads', bug)
    with pytest.raises(TypeError, match='a bug'):
        main(['heads', 'sa_quadratic_tiny_cifar', '--untrained'])


@pytest.mark.slow
def test_libraries_say_nothing_beside_what_commands_print(little, named, tmp_path):
    commands = [
        ['list'], ['list', '--tables'], ['classify', little, f'{named}/test/cat/0.png', '--fuse'], ['heads', little],
        ['eval', little, '--data', named], ['figures', little, '--out', str(tmp_path / 'figures')],
        ['bench', little, '--batch-size', '1', '--seconds', '0.01'],
        ['include', little, 'sa_quadratic_gen_cifar', '--output', str(tmp_path / 'included')]]
    code = 'import json, sys; from timm_selfconv.cli import main\nfor command in json.loads(sys.argv[1]): main(command)'
    done = subprocess.run([sys.executable, '-c', code, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '' and 'top-1' in done.stdout


@pytest.mark.parametrize('command', [
    ['include', '{net}', 'sa_quadratic_gen_cifar', '--output', 'out/net'],
    ['export', 'sa_quadratic_tiny_cifar', '--checkpoint', '{checkpoint}', '--data', '{data}', '--output', 'out'],
    ['explore', '{net}', '{data}/test/0/0.png', '--out', 'out/page.html'],
], ids=lambda command: command[0])
def test_a_file_size_limit_ends_in_one_line(command, little, checkpoint, folder, tmp_path, refused, monkeypatch, limit):
    monkeypatch.chdir(tmp_path)
    with limit(2_000):
        refused('File too large', [word.format(net=little, checkpoint=checkpoint, data=folder) for word in command])
    assert not [file for file in Path('out').rglob('*') if file.suffix in ('.safetensors', '.html', '.tmp')]


@pytest.mark.slow
def test_whoever_reads_may_stop_reading():
    for command in (['list', '--json'], ['--help']):
        process = subprocess.Popen(
            [sys.executable, '-c', 'from timm_selfconv.cli import main; main()', *command], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()  # as head
        assert process.stderr.read() == '' and process.wait() in (0, 1)
