"""Every code block of the README and its chapters runs, in this process if possible."""
import copy
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from PIL import Image
from timm.models import _registry

from pictures import fill
from timm_selfconv import cli
from timm_selfconv.measure.tables import format_zoo, zoo_rows
from timm_selfconv.weights.saving import save_folder

pytestmark = pytest.mark.slow
REPO = Path(__file__).resolve().parent.parent
PATH = os.pathsep.join([str(REPO / 'tests'), os.environ.get('PYTHONPATH', '')])
CIFAR10, SCRIPTS = os.environ.get('CIFAR10'), os.environ.get('TIMM_SCRIPTS')
CHAPTERS = [REPO / 'README.md', REPO / 'recipes' / 'README.md', *sorted((REPO / 'timm_selfconv').rglob('README.md'))]
# by chapter, so that a failure names it
BLOCKS = [
    (str(chapter.relative_to(REPO).parent), language, block) for chapter in CHAPTERS
    for language, block in re.findall(r'^```(\w*)\n(.*?)^```$', chapter.read_text(), re.MULTILINE | re.DOTALL)]
PYTHON = [pytest.param(block, id=f'{chapter}-{i}') for i, (chapter, language, block) in enumerate(BLOCKS)
          if language == 'python']
OUTPUTS = dict(re.findall(  # of Python blocks that a block of text follows
    r'^```python\n((?:(?!```).*\n)+)```\n\n```text\n((?:(?!```).*\n)+)```$',
    '\n'.join(chapter.read_text() for chapter in CHAPTERS), re.MULTILINE))
LINES = list(dict.fromkeys(
    line for _, language, block in BLOCKS if language == 'bash' for line in block.splitlines()))

needs_cifar10 = pytest.mark.skipif(not CIFAR10, reason="CIFAR10 names no folder in the Hub's parquet layout")
needs_scripts = pytest.mark.skipif(
    not (CIFAR10 and SCRIPTS), reason="TIMM_SCRIPTS names no folder with timm's scripts, CIFAR10 no images")
BRIEF = [
    '--device', 'cpu', '--no-prefetcher', '--workers', '0', '--batch-size', '2', '--epochs', '1',
    '--warmup-epochs', '0', '--dataset', f'hfds/{CIFAR10}', '--train-split', 'train[:4]', '--val-split', 'test[:4]',
]


def run(command, **environment):
    done = subprocess.run(command, cwd=REPO, env=dict(os.environ, **environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def lines(prefix):
    found = [shlex.split(line) for line in LINES if line.startswith(prefix)]
    assert found, f'no chapter has a line that starts with {prefix!r}'
    return found


def test_every_line_has_a_test_here():
    assert {language for _, language, _ in BLOCKS} <= {'python', 'bash', 'text', 'bibtex'}
    known = (
        'pip install ', 'timm-selfconv ', 'python train.py ', 'torchrun ', 'python -m timm_selfconv run ')
    assert [line for line in LINES if not line.startswith(known)] == []


@pytest.fixture
def registry(monkeypatch):
    """A copy of timm's registry that blocks can change."""
    for name, value in list(vars(_registry).items()):
        if isinstance(value, (dict, set)) and not name.startswith('__'):
            monkeypatch.setattr(_registry, name, copy.copy(value))


@pytest.mark.parametrize('block', PYTHON)
def test_python_blocks(block, registry, monkeypatch, tmp_path, capsys):
    # the zoo is registered here already, which hides that a block forgets it; torch.hub does it itself
    assert re.search(r'^(import|from) timm_selfconv|torch\.hub\.load', block, re.MULTILINE)
    monkeypatch.chdir(REPO)
    file = tmp_path / 'block.py'
    file.write_text(block)
    runpy.run_path(str(file), run_name='__main__')
    if block in OUTPUTS:
        # rounding errors such as 2e-07 differ by machine and by random weights
        printed, shown = (re.sub(r'\de-0\d', '', text) for text in (capsys.readouterr().out, OUTPUTS[block]))
        assert printed == shown


def test_the_table_is_current():
    """python -m timm_selfconv.measure.tables writes it."""
    rows = [row for row in zoo_rows() if row['weights']]
    assert format_zoo(rows, 'github') in (REPO / 'README.md').read_text()


DATASET = 'hfds/uoft-cs/cifar10'


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the files that the commands need: pictures, and a training run."""
    Image.new('RGB', (50, 40), 'white').save(tmp_path / 'cat.jpg')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'summary.csv').write_text('epoch,eval_top1\n0,40.5\n1,50.25\n')
    for name in ('cat', 'dog'):
        (tmp_path / 'pictures' / name).mkdir(parents=True)
        for i in range(3):
            Image.new('RGB', (50, 40), 'white').save(tmp_path / 'pictures' / name / f'{i}.jpg')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    'command', [c for c in lines('timm-selfconv') if DATASET not in c and c[1] != 'train'], ids=' '.join)
def test_commands(command, workplace, capfd):
    if 'local-dir:mynet' in command:
        save_folder(timm.create_model('sa_quadratic_tiny_cifar', num_classes=2), 'mynet')
    cli.main(command[1:])
    printed = capfd.readouterr()
    assert printed.out and not printed.err


@needs_cifar10
@pytest.mark.parametrize('command', [c for c in lines('timm-selfconv') if DATASET in c], ids=' '.join)
def test_commands_on_data(command, workplace, capsys):
    def start(command):
        command = [CIFAR10 if word == DATASET else word for word in command]
        cli.main([*command[1:], *(['--split', 'test[:100]'] if CIFAR10 in command else [])])

    if command[2].startswith('local-dir:'):  # the output of an earlier command
        start(next(c for c in lines('timm-selfconv prune') if c[-1] == command[2].removeprefix('local-dir:')))
    start(command)
    said = {'eval': 'on 100 images', 'figures': 'attention.png'}
    assert said[command[1]] in capsys.readouterr().out


@needs_scripts
@pytest.mark.parametrize('command', lines('python train.py') + lines('torchrun'), ids=lambda c: '-'.join(c[1:5]))
def test_training(command, tmp_path):
    number = command.index('train.py')
    options, brief = command[number + 1:], [*BRIEF, '--output', str(tmp_path)]
    if '--data-dir' in options:
        brief = [*BRIEF[:BRIEF.index('--dataset')], '--output', str(tmp_path)]
        options = [str(tmp_path / 'pictures') if word == 'pictures' else word for word in options]
        fill(tmp_path / 'pictures', ['train/cat', 'train/dog', 'val/cat', 'val/dog'])
    launch = [sys.executable]
    if command[0] == 'torchrun':
        assert command[1] == '--nproc_per_node=8'
        launch += ['-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone']
        brief += ['--device-modules', 'timm_selfconv', 'ddp_on_cpu']
    run([*launch, os.path.join(SCRIPTS, 'train.py'), *options, *brief], OMP_NUM_THREADS='1', PYTHONPATH=PATH)
    assert len(list(tmp_path.rglob('last.pth.tar'))) == 1


@needs_cifar10
@pytest.mark.parametrize('command', lines('timm-selfconv train'), ids=lambda c: c[2])
def test_fast_training(command, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    command = [str(tmp_path / 'run') if word == 'run' else re.sub('=(first|second)/', '=timm_selfconv/weights/', word)
               for word in command]  # `first` and `second` are exports of earlier trainings
    cli.main([*command[1:], '--data', CIFAR10, '--device', 'cpu', 'batch_size=4', 'epochs=1',
              'warmup_epochs=0', 'train_split=train[:4]', 'val_split=test[:4]'])
    assert (tmp_path / 'run' / 'last.pth.tar').is_file()


@needs_scripts
@pytest.mark.parametrize('command', lines('python -m timm_selfconv run'), ids=lambda c: c[4])
def test_other_scripts(command, tmp_path, as_a_script, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = [os.path.join(SCRIPTS, word) if word.endswith('.py') else word for word in command]
    places = {'hfds/uoft-cs/cifar10': f'hfds/{CIFAR10}', '*_tiny_cifar': 'sa_quadratic_tiny*'}  # one net is enough
    command = [places.get(word, word) for word in command]
    command[command.index('--split') + 1] = 'test[:64]'
    assert command[:3] == ['python', '-m', 'timm_selfconv']
    cli.main([*command[3:], '--no-prefetcher', '--workers', '0'])
    out = capfd.readouterr().out
    if 'bulk_runner.py' in command[4]:
        out = (tmp_path / 'results.csv').read_text()
        assert 'sa_quadratic_tiny_cifar' in out
    assert 'top1' in out
