import argparse
import dataclasses
import json
import os
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
import yaml
from PIL import Image
from timm.models import save_for_hf

from timm_selfconv import hub, train, weights
from timm_selfconv.measure import counting
from timm_selfconv.models import zoo_names
from timm_selfconv.cli import main
from timm_selfconv.commands.look import DEMO_MODEL
from timm_selfconv.theory import prune_heads

SMALL = dict(embed_dim=8, mlp_dim=8, patch_size=8)
RECIPES = Path(__file__).resolve().parent.parent / 'recipes'


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / 'net.safetensors'
    hub.save_weights(timm.create_model('sa_quadratic_tiny_cifar'), file)
    return str(file)


@pytest.fixture
def folder(tmp_path):
    """A dataset of one picture a class."""
    for label in range(10):
        (tmp_path / 'data' / 'test' / str(label)).mkdir(parents=True)
        Image.new('RGB', (40, 30), (25 * label,) * 3).save(tmp_path / 'data' / 'test' / str(label) / 'picture.png')
    return str(tmp_path / 'data')


def test_classify(checkpoint, folder, capsys):
    main(['classify', 'sa_quadratic_tiny_cifar', f'{folder}/test/3/picture.png', '--checkpoint', checkpoint])
    out = capsys.readouterr().out
    assert 'picture.png' in out and 'probability' in out


@pytest.mark.parametrize('fuse', [['--fuse'], ['--fuse', '1e-4']], ids=str)
def test_fused_nets_classify_alike(checkpoint, folder, capsys, fuse):
    command = ['classify', 'sa_quadratic_tiny_cifar', f'{folder}/test/3/picture.png', '--checkpoint', checkpoint]
    for options in ([], fuse):
        main([*command, '--json', *options])
    out = capsys.readouterr().out
    plain, fused = (json.loads(part + ']')[0] for part in out.split(']')[:2])
    assert plain['class'] == fused['class'] and fused['probability'] == pytest.approx(plain['probability'], abs=1e-3)


def test_eval(checkpoint, folder, capsys):
    command = ['eval', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder]
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['images'] == 10 and set(result['per_class'].values()) <= {0., 1.}
    main(command)
    out = capsys.readouterr().out
    assert f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f} on 10 images" in out and 'airplane' in out


@pytest.mark.parametrize('name', ['sa_quadratic_tiny_cifar', 'sa_quadratic_tiny_cifar.from_another_net'])
def test_export_writes_what_it_measured_and_nothing_twice(name, checkpoint, folder, tmp_path, capsys, monkeypatch):
    command = ['export', name, '--checkpoint', checkpoint, '--data', folder,
               '--output', str(tmp_path / 'out'), '--fact', 'seed=42', '--fact', 'recipe=a=b']
    main(command)
    card = (tmp_path / 'out' / f'{name}.md').read_text()
    assert '| seed | 42 |' in card and '| recipe | a=b |' in card
    assert '(10 images of the test split of data, from this file' in card and 'CIFAR-10' not in card

    monkeypatch.chdir(tmp_path / 'out')  # the card's snippet loads that very file
    scope = {}
    exec(card.split('```python')[1].split('```')[0], scope)
    saved = safetensors.torch.load_file(f'{name}.safetensors')
    loaded = {key: value.to(saved[key].dtype) for key, value in scope['model'].state_dict().items()}
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    with pytest.raises(SystemExit):
        main(command)
    assert 'exists' in capsys.readouterr().err
    assert (tmp_path / 'out' / f'{name}.md').read_text() == card


def test_a_card_where_weights_ship_loads_them_by_name(checkpoint, folder, tmp_path):
    output = tmp_path / 'timm_selfconv' / 'weights'
    main(['export', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder, '--output', str(output)])
    assert "create_model('sa_quadratic_tiny_cifar', pretrained=True).eval()" in next(output.glob('*.md')).read_text()


def test_export_that_fails_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(SystemExit):
        main(['export', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', 'nowhere',
              '--output', str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()


@pytest.fixture
def degenerate(tmp_path):
    """Weights of a general quadratic net with a flat head in layer 1 and a stripe in layer 4."""
    model = timm.create_model('sa_quadratic_gen_cifar', **SMALL)
    with torch.no_grad():
        model.blocks[1].attn.encoding.spreads[3] = 1e-4 * torch.eye(2)
        model.blocks[4].attn.encoding.spreads[0] = torch.tensor([[1., 0.], [0., 1e-4]])
    save_for_hf(model, tmp_path / 'net', safe_serialization=True)
    return f"local-dir:{tmp_path / 'net'}"


def test_prune(degenerate, tmp_path, capsys):
    command = ['prune', degenerate, '--output', str(tmp_path / 'out' / 'pruned')]
    main(command)
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if 'alike' in line or 'stripe' in line] == [
        ['1', '3'], ['4', '0']]
    assert '1e-08' in out and '1e+08' in out
    full = timm.create_model(degenerate, pretrained=True).eval()
    pruned = prune_heads(full, {1: [3], 4: [0]})
    for counts in (counting.count(full), counting.count(pruned)):
        assert all(f'{n:,}' in out for n in (counts.parameters, counts.linear_conv_flops, counts.flops))

    scope = dict(timm=timm)
    loaded = eval(next(line for line in out.splitlines() if line.startswith('Use it')).split(':', 1)[1].strip(), scope)
    assert loaded.num_heads == (9, 8, 9, 9, 8, 9)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded.eval()(x), pruned(x), rtol=0, atol=0)

    files = {path: path.read_bytes() for path in (tmp_path / 'out' / 'pruned').iterdir()}
    assert {path.name for path in files} == {'config.json', 'model.safetensors'}
    with pytest.raises(SystemExit):
        main(command)
    assert 'exists' in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / 'out').rglob('*') if path.is_file()} == files


def test_include_and_what_it_says_trains_on(tmp_path, capsys):
    source = timm.create_model('sa_quadratic_cifar', num_heads=4, num_classes=4, **SMALL).eval()
    save_for_hf(source, tmp_path / 'net', safe_serialization=True)
    for label in range(4):
        (tmp_path / 'data' / 'test' / str(label)).mkdir(parents=True)
        Image.new('RGB', (32, 32), (60 * label, 99, 7)).save(tmp_path / 'data' / 'test' / str(label) / 'picture.png')
    net, output = f"local-dir:{tmp_path / 'net'}", str(tmp_path / 'rich')
    command = ['include', net, 'sa_learned_content_cifar', '--output', output]
    main(command)
    use, line = (line.split(':', 1)[1].strip() for line in capsys.readouterr().out.splitlines())
    rich = eval(use, dict(timm=timm)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(rich(x), source(x), rtol=1e-4, atol=1e-4)
    main(['heads', f"local-dir:{tmp_path / 'rich'}", '--images', str(tmp_path / 'data' / 'test' / '1' / 'picture.png')])
    assert 'residual' in capsys.readouterr().out

    python, m, module, recipe, *arguments = shlex.split(line)
    assert (python, m, module) == ('python', '-m', 'timm_selfconv.train')
    train.main([recipe, *arguments, '--data', str(tmp_path / 'data'), '--device', 'cpu',
                'train_split=test', 'batch_size=2', 'epochs=1', 'warmup_epochs=0', 'lr=1e-9'])
    trained = torch.load(tmp_path / 'rich-trained' / 'last.pth.tar', weights_only=False)['state_dict']
    torch.testing.assert_close(trained, dict(rich.state_dict()), rtol=0, atol=1e-6)  # at next to no learning rate
    with pytest.raises(SystemExit):
        main(command)
    assert 'exists' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(['include', f"local-dir:{tmp_path / 'rich'}", 'sa_quadratic_cifar', '--output', str(tmp_path / 'poor')])
    assert 'no rung leads there' in capsys.readouterr().err and not (tmp_path / 'poor').exists()


def test_prune_for_machines(degenerate, tmp_path, capsys):
    main(['prune', degenerate, '--output', str(tmp_path / 'pruned'), '--json'])
    result = json.loads(capsys.readouterr().out)
    assert [(row['layer'], row['head dropped']) for row in result['dropped']] == [(1, 3), (4, 0)]
    counts = counting.count(timm.create_model(result['model'], pretrained=True))
    assert result['after'] == dataclasses.asdict(counts) and 'train.py' in result['train']
    assert result['before']['parameters'] > result['after']['parameters']


def test_prune_that_fails_leaves_nothing(degenerate, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError('no space left')

    monkeypatch.setattr('safetensors.torch.save_file', full_disk)
    with pytest.raises(SystemExit):
        main(['prune', degenerate, '--output', str(tmp_path / 'out' / 'pruned')])
    assert list((tmp_path / 'out').iterdir()) == []


def test_prune_the_heads_one_names(checkpoint, tmp_path, capsys):
    command = ['prune', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--output', str(tmp_path / 'pruned')]
    with pytest.raises(SystemExit):
        main(command)
    assert 'nothing to prune' in capsys.readouterr().err and not (tmp_path / 'pruned').exists()
    main([*command, '--heads', '0:1,8', '5:0'])
    assert '1, 8' in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'pruned'}", pretrained=True)
    assert model.num_heads == (7, 9, 9, 9, 9, 8)


def test_what_prune_says_trains_the_pruned_net_on(degenerate, timm_scripts, tmp_path, capsys):
    datasets = pytest.importorskip('datasets')
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(num_classes=10))
    pictures = dict(img=[Image.new('RGB', (32, 32), (60, 99, 25 * i)) for i in range(4)], label=list(range(4)))
    for split in ('train', 'test'):
        datasets.Dataset.from_dict(pictures, features=features).to_parquet(
            tmp_path / 'data' / f'{split}-00000-of-00001.parquet')
    main(['prune', degenerate, '--output', str(tmp_path / 'pruned')])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('Train it on'))
    python, script, *command = shlex.split(line.split(':', 1)[1])
    assert python == 'python' and script == 'train.py'
    recipe = RECIPES / 'pruned.yaml'
    assert command[0] == '-c' and Path(command[1]).read_text() == recipe.read_text()
    for key, value in yaml.safe_load(recipe.read_text())['model_kwargs'].items():
        assert f'{key}={value}' in command  # they would be lost
    done = subprocess.run(
        [sys.executable, os.path.join(timm_scripts, script), *command, '--dataset',
         f"hfds/{tmp_path / 'data'}", '--device', 'cpu', '--no-prefetcher', '--workers', '0', '--batch-size', '2',
         '--epochs', '1', '--warmup-epochs', '0', '--lr', '1e-9', '--output', str(tmp_path), '--experiment', 'run'],
        env=dict(os.environ, HF_DATASETS_CACHE=str(tmp_path / 'cache')), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    trained = torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=False)['state_dict']
    pruned = timm.create_model(f"local-dir:{tmp_path / 'pruned'}", pretrained=True).state_dict()
    torch.testing.assert_close(trained, dict(pruned), rtol=0, atol=1e-6)  # at next to no learning rate


def test_bench_against_the_released_algorithm(capsys):
    command = ['bench', 'sa_quadratic_tiny_cifar', '--img-size', '8', '--batch-size', '1', '2', '--seconds', '0.01']
    main([*command, '--fuse', '1e-4'])
    out = capsys.readouterr().out
    assert out.count('released algorithm') == out.count('fused') == 2 and 'of the GEMM limit' in out
    main([*command, '--train', '--dtype', 'bfloat16', '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['train'] and [(s['path'], s['batch_size'], s['dtype']) for s in result['speeds']] == [
        (path, batch, 'bfloat16') for batch in (1, 2) for path in ('released algorithm', 'timm_selfconv')]


def test_heads(checkpoint, capsys):
    command = ['heads', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--kernel-size', '5']
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['model'] == 'sa_quadratic_tiny_cifar' and result['kernel_size'] == 5
    assert [layer['layer'] for layer in result['layers']] == list(range(6))
    assert all(16 / 25 <= layer['residual'] <= layer['shared_residual'] <= 1 for layer in result['layers'])
    assert [head['head'] for head in result['layers'][5]['heads']] == list(range(9))
    main(command)
    out = capsys.readouterr().out
    assert f"{result['layers'][3]['residual']:.3f}" in out and '5 x 5 convolution' in out


def test_heads_of_a_net_that_looks_at_content(folder, tmp_path, capsys):
    file = tmp_path / 'content.safetensors'
    hub.save_weights(timm.create_model('sa_learned_content_tiny_cifar'), file)
    command = ['heads', 'sa_learned_content_tiny_cifar', '--checkpoint', str(file)]
    with pytest.raises(SystemExit):
        main(command)
    assert 'images: this net looks at content' in capsys.readouterr().err
    main([*command, '--json', '--images', f'{folder}/test/3/picture.png', f'{folder}/test/7/picture.png'])
    assert len(json.loads(capsys.readouterr().out)['layers']) == 6


def test_list_and_tables_for_machines(capsys):
    main(['list', '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert {row['name'] for row in rows} == set(zoo_names())
    main(['tables', '--json'])
    printed = json.loads(capsys.readouterr().out)
    assert printed['tables'][0]['label'] == 'ResNet18' and {'paper', 'here'} <= set(printed['results'][0])


@pytest.mark.skipif(not weights.weights_path(DEMO_MODEL).is_file(), reason=f'{DEMO_MODEL} has no weights here')
def test_demo_on_ones_own_picture(folder, capsys):
    main(['demo', f'{folder}/test/3/picture.png'])
    out = capsys.readouterr().out
    assert 'picture.png' in out and 'Table 1' in out and '12.1M' in out
    main(['demo', f'{folder}/test/3/picture.png', '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['pictures'][0]['class'] in out and result['tables'][0]['parameters'] in out


@pytest.mark.parametrize('command,message', [
    (['classify', 'sa_quadratic_cifar', 'x.png'], 'sa_quadratic_cifar has no trained weights'),
    (['classify', 'sa_quadratic_tinny_cifar', 'x.png'], 'did you mean sa_quadratic_tiny_cifar'),
    (['heads', 'sa_quadratic_tiny_cifar', '--checkpoint', ''], "checkpoint=''"),
    (['bench', 'sa_quadratic_tiny_cifar', '--train', '--fuse'], 'a fused net is for inference'),
    (['classify', 'resnet_tiny_cifar', 'x.png', '--fuse'], 'has no SelfAttention2d layers to fuse'),
    (['heads', 'sa_quadratic_tiny_cifar', '--images', 'nowhere.png'], "image 'nowhere.png'"),
    (['run', 'nowhere.py'], "script='nowhere.py'"),
    (['eval', 'sa_quadratic_tiny_cifar', '--data', '.', '--checkpoint', 'nowhere.safetensors'],
     "checkpoint='nowhere.safetensors'"),
    (['prune', 'sa_quadratic_gen_cifar', '--output', 'z'], 'sa_quadratic_gen_cifar has no trained weights'),
    (['prune', 'sa_quadratic_tiny_cifar', '--output', '.'], '. exists'),
    (['prune', 'sa_quadratic_tiny_cifar', '--output', 'z', '--heads', '0:1;2'], "heads='0:1;2': needs LAYER:HEAD,HEAD"),
    (['prune', 'sa_quadratic_tiny_cifar', '--output', 'z', '--heads', '0:1', '0:2'], "heads='0:2'"),
    (['prune', 'sa_quadratic_tiny_cifar', '--output', 'z', '--heads', '9:1'], 'no layer 9'),
    (['prune', 'sa_learned_tiny_cifar', '--output', 'z'], 'say which heads to prune'),
    (['export', 'sa_quadratic_tiny_cifar', '--checkpoint', 'x', '--data', 'y', '--output', 'z', '--fact', 'seed'],
     "fact='seed'"),
])
def test_bad_input_ends_in_one_line(command, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(command)
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and err.count('\n') == 1


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder of files and folders that hold something else than their names say."""
    monkeypatch.chdir(tmp_path)
    Path('text.pt').write_text('hello')
    Path('empty.pt').touch()
    Path('text.safetensors').write_text('hello')
    net = torch.nn.Linear(2, 2)
    things = dict(tensor=torch.zeros(3), word='word', module=net, other=net.state_dict(), state=dict(state_dict=3))
    for name, thing in things.items():
        torch.save(thing, f'{name}.pt')
    for file in (*Path().glob('*.pt'), 'nothing', 'folder'):
        run = Path('runs', Path(file).stem)
        (run / 'checkpoint-0.pth.tar' if file == 'folder' else run).mkdir(parents=True)
        if file not in ('nothing', 'folder'):
            shutil.copyfile(file, run / 'checkpoint-0.pth.tar')
    model = '"architecture": "sa_quadratic_tiny_cifar"'
    configs = dict(
        text='hello', list='[]', unknown='{"architecture": "nowhere"}', damaged=f'{{{model}}}',
        wrong=f'{{{model}, "model_args": {{"nowhere": 3}}, "pretrained_cfg": {{}}}}')
    for name, config in configs.items():
        Path('nets', name).mkdir(parents=True)
        Path('nets', name, 'config.json').write_text(config)
        Path('nets', name, 'model.safetensors').write_text('hello')
    Path('data', 'test', 'cat').mkdir(parents=True)
    Image.new('RGB', (32, 32)).save('data/test/cat/picture.png')
    Path('parquet').mkdir()
    Path('parquet', 'test-00000-of-00001.parquet').write_text('hello')
    for name, content in dict(bytes=bytes(range(256)), words=b'epoch,eval_top1\n0,many\n').items():
        Path('runs', name).mkdir()
        Path('runs', name, 'summary.csv').write_bytes(content)


HEADS, EVAL, FIGURES = ([command, 'sa_quadratic_tiny_cifar'] for command in ('heads', 'eval', 'figures'))


@pytest.mark.parametrize('command,message', [
    *(([*HEADS, '--checkpoint', file], f'checkpoint={file!r}: cannot be loaded') for file in (
        'text.pt', 'empty.pt', 'text.safetensors', 'tensor.pt', 'word.pt', 'module.pt', 'other.pt', 'state.pt')),
    *(([*HEADS, '--checkpoint', file], f'checkpoint={file!r}: needs a weight file') for file in ('', '/dev/null')),
    (['export', 'sa_quadratic_tiny_cifar', '--checkpoint', 'tensor.pt', '--data', 'data', '--output', 'out'],
     "checkpoint='tensor.pt': cannot be loaded"),
    *((['heads', f'local-dir:nets/{name}'], f"model='local-dir:nets/{name}': cannot be loaded") for name in (
        'nowhere', 'text', 'list', 'unknown', 'damaged', 'wrong')),
    *((['heads', name], f'model={name!r}: cannot be loaded') for name in (
        'hf-hub:nobody/nothing', 'hf-hub:nobody', 'hub:nobody/nothing', ':')),
    (['bench', 'hf-hub:nobody/nothing'], "model='hf-hub:nobody/nothing': cannot be loaded"),
    *(([*EVAL, '--data', data], f'data={data!r}') for data in (
        'hfds/nobody/nothing', 'hfds/', 'hfids/nobody/nothing', 'torch/nothing', 'torch/cifar10', 'torch/',
        'wds/nothing', 'runs/nothing', '', 'text.pt')),
    ([*EVAL, '--data', 'parquet'], "data='hfds/parquet'"),
    ([*EVAL, '--data', 'data', '--class-map', 'nowhere'], "data='data'"),
    *(([*EVAL, '--data', 'data', '--device', device], f'device={device!r}') for device in ('abacus', 'meta', '')),
    ([*HEADS, '--kernel-size', '1000000000'], 'kernel_size=1000000000: needs a kernel that fits in a grid of 8 x 8'),
    ([*HEADS, '--kernel-size', '0'], 'kernel_size=0'),
    ([*FIGURES, '--out', 'out', '--data', 'hfds/nobody/nothing'], "data='hfds/nobody/nothing'"),
    *(([*FIGURES, '--out', 'out', '--run', f'runs/{name}'], f"run='runs/{name}': checkpoint-0.pth.tar is no checkpoint")
      for name in ('text', 'empty', 'tensor', 'word', 'module', 'other', 'state', 'folder')),
    ([*FIGURES, '--out', 'out', '--run', ''], "run='.'"),
    (['curves', 'runs/bytes', '--out', 'out'], 'runs/bytes/summary.csv: needs numbers'),
    (['curves', 'runs/words', '--out', 'out'], 'runs/words/summary.csv: needs numbers'),
    (['publish', 'resnet_tiny_cifar', '--images', 'data/test/cat/picture.png', '--owner', 'nobody', '--dry-run'],
     'nobody/resnet_tiny_cifar: '),
    (['prune', 'sa_quadratic_tiny_cifar', '--output', 'out', '--min-eigenvalue', 'nan'], 'min_eigenvalue=nan'),
], ids=lambda value: ' '.join(value) if isinstance(value, list) else '')
def test_what_is_broken_or_away_ends_in_one_line(command, message, broken, capsys, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('datasets.config.HF_HUB_OFFLINE', True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # as cli says before its first import
    with pytest.raises(SystemExit) as error:
        main(command)
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and err.count('\n') == 1 and len(err) < 800
    assert not os.path.lexists('out')


@pytest.mark.parametrize('silent', [True, False])
@pytest.mark.parametrize('command', [
    ['heads', 'hf-hub:nobody/nothing'],
    ['eval', 'sa_quadratic_tiny_cifar', '--data', 'hfds/nobody/nothing'],
    ['publish', 'resnet_tiny_cifar', '--images', 'data/test/cat/picture.png', '--owner', 'nobody', '--dry-run'],
], ids=' '.join)
def test_a_hub_that_does_not_answer_is_asked_once(command, silent, broken, capsys, monkeypatch):
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
        with pytest.raises(SystemExit) as error:
            main(command)
        released.set()
        server.shutdown()
    err = capsys.readouterr().err
    assert error.value.code == 2 and 'does not answer' in err and err.count('\n') == 1 and len(asked) == 1


def test_only_what_the_user_did_wrong_loses_its_traceback(monkeypatch):
    def bug(*args, **kwargs):
        raise TypeError('a bug')

    monkeypatch.setattr('timm_selfconv.commands.look.report_heads', bug)
    with pytest.raises(TypeError, match='a bug'):
        main(['heads', 'sa_quadratic_tiny_cifar', '--untrained'])


def test_untrained_nets_are_those_of_their_seed(tmp_path, capsys):
    def report(*options):
        main(['heads', 'sa_quadratic_tiny_cifar', '--json', *options])
        return json.loads(capsys.readouterr().out)['layers']

    first = report('--untrained', '--seed', '1')
    torch.manual_seed(1)
    hub.save_weights(timm.create_model('sa_quadratic_tiny_cifar'), tmp_path / 'net.safetensors', torch.float32)
    assert first == report('--untrained', '--seed', '1') == report('--checkpoint', str(tmp_path / 'net.safetensors'))
    assert first != report('--untrained', '--seed', '2')


def imported(*command):
    """Modules that the command line has imported in the end."""
    code = 'import sys; sys.argv[0] = "timm-selfconv"; from timm_selfconv_cli import main\ntry: main()\n' \
        'finally: print(*sys.modules, file=sys.stderr)'
    return subprocess.run([sys.executable, '-c', code, *command], capture_output=True, text=True)


def test_help_does_not_wait_for_torch():
    done = imported('--help')
    assert 'explore' in done.stdout and not {'torch', 'timm', 'fvcore'} & set(done.stderr.split())
    assert 'did you mean' in imported('classify', 'resnet_tinny_cifar', 'x.png').stderr  # the zoo is there if need be


def test_libraries_say_nothing_beside_what_commands_print(checkpoint, folder, tmp_path):
    net = ['sa_quadratic_tiny_cifar', '--checkpoint', checkpoint]
    commands = [
        ['list'], ['tables'], ['classify', *net, f'{folder}/test/3/picture.png', '--fuse'], ['heads', *net],
        ['eval', *net, '--data', folder], ['figures', *net, '--out', str(tmp_path / 'figures')],
        ['bench', *net, '--batch-size', '1', '--seconds', '0.01'],
        ['include', *net, 'sa_learned_tiny_cifar', '--output', str(tmp_path / 'included')]]
    code = 'import json, sys; from timm_selfconv_cli import main\nfor command in json.loads(sys.argv[1]): main(command)'
    done = subprocess.run([sys.executable, '-c', code, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '' and 'top-1' in done.stdout


def test_run_registers_the_zoo_for_any_script(tmp_path):
    (tmp_path / 'beside.py').write_text('VALUE = 7')
    script = tmp_path / 'script.py'
    script.write_text(
        'import sys, timm, beside\n'
        'assert __name__ == "__main__"\n'
        'print(timm.is_model(sys.argv[2]), sys.argv[1:], beside.VALUE)\n'
        'sys.exit(3)\n')
    command = [sys.executable, '-m', 'timm_selfconv', 'run', str(script), '--model', 'sa_quadratic_cifar', '-b', '2']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "True ['--model', 'sa_quadratic_cifar', '-b', '2'] 7"


def test_run_under_torchrun(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(
        'import os, sys, timm\n'
        'open(sys.argv[1] + os.environ["RANK"], "w").write(str(timm.is_model("sa_quadratic_cifar")))\n')
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'timm_selfconv',
        'run', str(script), str(tmp_path / 'rank')]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f'rank{i}').read_text() for i in range(2)] == ['True', 'True']


@pytest.fixture
def little(tmp_path):
    """A net of one layer, whose figures are drawn fast."""
    model = timm.create_model('sa_quadratic_cifar', depth=1, num_heads=2, **SMALL)
    save_for_hf(model, tmp_path / 'little', safe_serialization=True)
    return f"local-dir:{tmp_path / 'little'}"


def test_figures(little, folder, tmp_path, capsys):
    command = ['figures', little, '--out', str(tmp_path / 'out')]
    main([*command, '--images', f'{folder}/test/3/picture.png', '--query', '1', '3'])
    names = ['centers', 'attention', 'attention-7x7', 'average', 'statistics', 'attention-picture', 'overlay-picture',
             'average-picture']
    files = [str(tmp_path / 'out' / f'{name}.png') for name in names]
    assert capsys.readouterr().out.split() == files
    assert all(Image.open(file).width == 990 for file in files)  # 5.5 inches at 180 dots
    os.remove(files[0])
    with pytest.raises(SystemExit):
        main(command)
    assert 'out exists' in capsys.readouterr().err
    assert not os.path.exists(files[0])


@pytest.mark.parametrize('args,message', [
    (['--query', '4', '0'], 'query=(4, 0): needs a row and a column on the grid of 4 x 4'),
    (['--images', 'nowhere.png'], "image 'nowhere.png': needs a readable picture"),
    (['--images', 'a.png', '--data', 'b'], 'not both'),
    (['--data', 'nowhere'], "data='nowhere': needs a folder"),
    (['--count', '0'], 'count=0: needs at least 1'),
    (['--run', 'nowhere'], "run='nowhere': needs a folder with checkpoint-*.pth.tar files")])
def test_figures_of_what_is_not_there(little, tmp_path, capsys, args, message):
    with pytest.raises(SystemExit):
        main(['figures', little, '--out', str(tmp_path / 'out'), *args])
    assert message in capsys.readouterr().err and not (tmp_path / 'out').exists()


def test_figures_over_a_dataset_and_of_a_run(little, folder, tmp_path):
    model = timm.create_model(little, pretrained=True)
    (tmp_path / 'run').mkdir()
    for epoch in range(2):
        state = dict(epoch=epoch, args=argparse.Namespace(seed=42), state_dict=model.state_dict())
        torch.save(state, tmp_path / 'run' / f'checkpoint-{epoch}.pth.tar')
    main(['figures', little, '--data', folder, '--count', '3', '--out', str(tmp_path / 'out'),
          '--run', str(tmp_path / 'run'), '--format', 'svg'])
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == [
        'attention-7x7.svg', 'attention.svg', 'average.svg', 'centers.svg', 'statistics.svg', 'training.svg']


def test_curves(tmp_path, capsys):
    for run in ('a/x', 'b/x'):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / 'summary.csv').write_text('epoch,eval_top1\n0,40.0\n1,50.0\n')
    command = ['curves', str(tmp_path / 'a/x'), str(tmp_path / 'b/x'), '--out', str(tmp_path / 'curves.pdf')]
    main(command)
    assert (tmp_path / 'curves.pdf').read_bytes().startswith(b'%PDF')
    for wrong, message in [(command, 'exists'), (['curves', 'nowhere', '--out', 'a.png'], "run='nowhere'")]:
        with pytest.raises(SystemExit):
            main(wrong)
        assert message in capsys.readouterr().err


def test_explore(checkpoint, folder, tmp_path, capsys):
    picture, page = f'{folder}/test/3/picture.png', tmp_path / 'out' / 'explorer.html'
    command = ['explore', 'sa_quadratic_tiny_cifar', picture, picture, '--out', str(page)]
    main([*command, '--versus', 'sa_learned_content_tiny_cifar', '--checkpoint', checkpoint, '--labels', 'cat', 'dog'])
    assert 'open it in a browser' in capsys.readouterr().out
    text = page.read_text()
    weights = f'weights of {Path(checkpoint).name}'
    for name in ('sa_quadratic_tiny_cifar', 'sa_learned_content_tiny_cifar', 'picture.png', 'picture.png (2)', weights):
        assert f'"{name}"' in text
    with pytest.raises(SystemExit):
        main(command)
    assert 'exists' in capsys.readouterr().err and page.read_text() == text


@pytest.mark.parametrize('model,picture,extra,message', [
    ('sa_quadratic_tiny_cifar', 'truncated.safetensors', [], 'needs a readable picture file'),
    ('resnet_tiny_cifar', 'data/test/3/picture.png', [], 'has no attention maps'),
    ('sa_quadratic_tiny_cifar', 'data/test/3/picture.png', ['--checkpoint', 'truncated.safetensors'], 'checkpoint='),
    ('sa_quadratic_tiny_cifar', 'data/test/3/picture.png', ['--checkpoint', 'truncated.pth'], 'checkpoint='),
    ('sa_quadratic_tiny_cifar', 'data/test/3/picture.png', ['--checkpoint', 'a', '--checkpoint', 'b'], 'checkpoint='),
])
def test_explore_that_fails_leaves_nothing(model, picture, extra, message, checkpoint, folder, tmp_path, capsys,
                                           monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('truncated.safetensors').write_bytes(Path(checkpoint).read_bytes()[:-1000])
    torch.save(timm.create_model('sa_quadratic_tiny_cifar').state_dict(), 'whole.pth')
    Path('truncated.pth').write_bytes(Path('whole.pth').read_bytes()[:-1000])
    with pytest.raises(SystemExit):
        main(['explore', model, picture, *extra, '--out', 'out/explorer.html'])
    assert message in capsys.readouterr().err
    assert not Path('out').exists()
