"""Error messages of commands: one line on stderr for a mistake of the user."""
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch

from pictures import fill
from timm_selfconv.cli import main

NET, BARE = 'sa_quadratic_tiny_cifar', 'sa_learned_content_hier_h16_cifar'  # with and without weights


@pytest.fixture(scope='module')
def broken(tmp_path_factory):
    """Work in a folder with broken checkpoints, nets and datasets."""
    texts = dict.fromkeys(('text.pt', 'text.safetensors', 'parquet/test-00000-of-00001.parquet',
                           'nets/text/config.json', 'nets/damaged/model.safetensors'), 'hello')
    texts['words/summary.csv'] = 'epoch,eval_top1\n0,many\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('broken'))
        for file, text in {**texts, 'nets/damaged/config.json': f'{{"architecture": "{NET}"}}'}.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text)
        torch.save(torch.nn.Linear(2, 2), 'module.pt')
        lightning = {f'model.{name}': value for name, value in timm.create_model(NET).state_dict().items()}
        torch.save(dict(state_dict=lightning, epoch=3), 'lightning.pt')
        Path('nothing').mkdir()
        fill(Path('data', 'test'), ['cat'])
        fill(Path('own'), ['cat', 'dog'], count=2)
        yield


HEADS, EVAL, FIGURES, PRUNE = (
    f'{command} {NET}' for command in ('heads', 'eval', 'figures --output out', 'prune --output out'))


@pytest.mark.parametrize('command,message', [
    (f'heads {BARE}', f'{BARE} has no trained weights'),
    (f'shifts {NET} {BARE} --data nowhere --output out.png', f'cannot be loaded ({BARE} has no trained weights'),
    (f'classify {NET} nowhere.png', ': nowhere.png: no such file'),
    (f'{FIGURES} --images nowhere.png', ': nowhere.png: no such file'),
    (f'finetune {NET} nowhere --output out', "folder='nowhere': "),
    (f'finetune {BARE} own --output out', 'has no trained weights yet'),
    (f'finetune {NET} own nonsense=1 --output out', 'nonsense'),
    (f'finetune {NET} own model=vgg11 --output out', "['model=vgg11']: finetune takes the net from MODEL"),
    (f'finetune {NET} own img_size=18 --output out', 'timm-selfconv: img_size=18: needs'),
    ('heads resnet18 --untrained', 'model=resnet18: has no attention maps; needs'),
    ('heads san_pairwise_cifar --untrained', 'model=san_pairwise_cifar: has no attention maps; needs'),
    (f'classify {NET} parquet', "images=['parquet']: needs at least one picture"),
    (f'{PRUNE} --heads 0:1;2', "'0:1;2': needs LAYER:HEAD,HEAD"),
    (f'{PRUNE} --heads 0:1 0:2', 'needs each layer once'),
    ('prune sa_learned_tiny_cifar --output out', 'name the heads to prune'),
    (f'{HEADS} --checkpoint text.safetensors', "checkpoint='text.safetensors': cannot be loaded"),
    (f'{HEADS} --checkpoint module.pt', "checkpoint='module.pt': cannot be loaded"),
    (f'{HEADS} --checkpoint lightning.pt', "checkpoint='lightning.pt': cannot be loaded; all keys begin with 'model.'"),
    (f'{HEADS} --checkpoint /dev/null', '--checkpoint: /dev/null: needs a file'),
    ('heads local-dir:nets/nowhere', 'MODEL: nets/nowhere/config.json: no such file'),
    ('heads local-dir:nets/text', "model='local-dir:nets/text': cannot be loaded"),
    ('heads local-dir:nets/damaged', "model='local-dir:nets/damaged': cannot be loaded"),
    ('heads hf-hub:nobody/nothing', "model='hf-hub:nobody/nothing': cannot be loaded"),
    ('heads sa_quadratic_cifar.cifar', "available: ['sa_quadratic_cifar.cifar10', 'sa_quadratic_cifar.dist_cifar"),
    (f'{EVAL} --data hfds/nobody/nothing', "data='hfds/nobody/nothing'"),
    (f'{EVAL} --checkpoint nowhere.png --data data', ': nowhere.png: no such file'),
    (f'{EVAL} --data text.pt', "data='text.pt'"),
    (f'{EVAL} --data nothing', "folder='nothing': has no pictures"),
    (f'{EVAL} --data parquet', "data='hfds/parquet'"),
    (f'{EVAL} --data data --device meta', "device='meta'"),
    (f'{HEADS} --kernel-size 1000000000', 'kernel_size=1000000000: needs a kernel that fits in a grid of 8 x 8'),
    (f'{FIGURES} --run nothing', "run='nothing': needs a net with a shipped history"),
    (f'{FIGURES} --run sa_learned_tiny_cifar',
     'sa_learned_tiny_cifar.history.json: belongs to the net sa_learned_tiny_cifar, not to sa_quadratic_tiny_cifar'),
    (f'{FIGURES} --curves words', 'words/summary.csv: needs numbers'),
    ('figures san_pairwise_cifar --images data/test/cat/0.png --output out --run run',
     'run: vector attention has only footprints'),
    ('bench gmlp_ti16_224 --untrained --img-size 100 --batch-size 1', 'img_size=100: MlpMixer does not accept it'),
    ('publish resnet_tiny_cifar --owner nobody', 'nobody/resnet_tiny_cifar: '),
    ('publish other nothing --owner me',
     "models=['nothing', 'other']: needs local-dir:FOLDER, or weights of the zoo: resnet"),
])
def test_a_mistake_ends_in_one_line(command, message, broken, refused, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('datasets.config.HF_HUB_OFFLINE', True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # as cli does before its imports
    refused(message, command.split())
    assert not os.path.lexists('out')


@pytest.mark.parametrize('command', [
    'heads hf-hub:nobody/nothing', 'heads vit_tiny_patch16_224', f'{EVAL} --data hfds/nobody/nothing',
    'publish resnet_tiny_cifar --owner nobody'])
def test_a_hub_that_does_not_answer_is_asked_once(command, refused, client):
    with socket.create_server(('127.0.0.1', 0)) as server:
        client(ENDPOINT=f'http://127.0.0.1:{server.getsockname()[1]}', HF_HUB_ETAG_TIMEOUT=0.2)
        refused('does not answer', command.split())
        server.setblocking(False)
        server.accept()
        with pytest.raises(BlockingIOError):  # no second connection
            server.accept()


def test_a_net_without_its_weights_can_be_initialised(refused, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', mock.Mock(side_effect=FileNotFoundError('no')))
    refused("model='test_vit': cannot be loaded; --untrained initialises it", ['heads', 'test_vit'])


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr('timm_selfconv.commands.use.report_heads', mock.Mock(side_effect=TypeError('a bug')))
    with pytest.raises(TypeError, match='a bug'):
        main(['heads', 'sa_quadratic_tiny_cifar', '--untrained'])


@pytest.mark.slow
def test_libraries_print_nothing(little, folder, tmp_path):
    commands = [
        'list', 'list --tables', f'classify {little} {folder}/test/cat/0.png', f'heads {little}',
        f'eval {little} --data {folder}', f'figures {little} --output {tmp_path}/figures',
        f'bench {little} --batch-size 1 --seconds 0.01',
        f'include {little} sa_quadratic_gen_cifar --output {tmp_path}/included']
    code = 'import sys; from timm_selfconv.cli import main\nfor command in sys.argv[1:]: main(command.split())'
    done = subprocess.run([sys.executable, '-c', code, *commands], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '' and 'top-1' in done.stdout


@pytest.mark.parametrize('command', [
    ['export', 'sa_quadratic_tiny_cifar', '--checkpoint', '{checkpoint}', '--data', '{data}', '--output', 'out'],
    ['explore', '{net}', '{data}/test/cat/0.png', '--out', 'out/page.html'],
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
