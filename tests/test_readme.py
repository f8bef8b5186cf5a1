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
CHAPTERS = [REPO / 'README.md', REPO / 'recipes' / 'README.md', *sorted((REPO / 'timm_selfconv').rglob('README.md'))]
# chapter (so that a failure names it), language, block, and the block of text that follows at once
BLOCKS = [(str(chapter.relative_to(REPO).parent), *block) for chapter in CHAPTERS for block in re.findall(
    r'^```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?', chapter.read_text(), re.MULTILINE | re.DOTALL)]
PYTHON = [pytest.param(block, output, id=f'{chapter}-{i}')
          for i, (chapter, language, block, output) in enumerate(BLOCKS) if language == 'python']
LINES = list(dict.fromkeys(
    line for _, language, block, _ in BLOCKS if language == 'bash' for line in block.splitlines()))
DATASET = 'hfds/uoft-cs/cifar10'


def lines(prefix):
    found = [shlex.split(line) for line in LINES if line.startswith(prefix)]
    assert found, f'no chapter has a line that starts with {prefix!r}'
    return found


def test_every_line_has_a_test_here():
    assert {language for _, language, *_ in BLOCKS} <= {'python', 'bash', 'text', 'bibtex'}
    known = 'pip install ', 'timm-selfconv ', 'python train.py ', 'torchrun ', 'python -m timm_selfconv run '
    assert [line for line in LINES if not line.startswith(known)] == []


@pytest.mark.parametrize('block,output', PYTHON)
def test_python_blocks(block, output, monkeypatch, tmp_path, capsys):
    # the zoo is registered here already, which hides that a block forgets it; torch.hub does it itself
    assert re.search(r'^(import|from) timm_selfconv|torch\.hub\.load', block, re.MULTILINE)
    for name, value in list(vars(_registry).items()):  # blocks change a copy of timm's registry
        if isinstance(value, (dict, set)) and not name.startswith('__'):
            monkeypatch.setattr(_registry, name, copy.copy(value))
    monkeypatch.chdir(REPO)
    file = tmp_path / 'block.py'
    file.write_text(block)
    runpy.run_path(str(file), run_name='__main__')
    if output:
        # rounding errors such as 2e-07 differ by machine and by random weights
        printed, shown = (re.sub(r'\de-0\d', '', text) for text in (capsys.readouterr().out, output))
        assert printed == shown


def test_the_table_is_current():
    """python -m timm_selfconv.measure.tables writes it."""
    rows = [row for row in zoo_rows() if row['weights']]
    assert format_zoo(rows, 'github') in (REPO / 'README.md').read_text()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the pictures that the commands need."""
    Image.new('RGB', (50, 40), 'white').save(tmp_path / 'cat.jpg')
    fill(tmp_path / 'pictures', ['cat', 'dog'], 3, (40, 50), suffix='.jpg')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    'command', [c for c in lines('timm-selfconv') if DATASET not in c and c[1] != 'train'], ids=' '.join)
def test_commands(command, workplace, capfd):
    if 'local-dir:mynet' in command:
        save_folder(timm.create_model('sa_quadratic_tiny_cifar', num_classes=2), 'mynet')
    cli.main(command[1:])
    printed = capfd.readouterr()
    assert printed.out and not printed.err


@pytest.mark.parametrize('command', [c for c in lines('timm-selfconv') if DATASET in c], ids=' '.join)
def test_commands_on_data(command, cifar10, workplace, output_of):
    if command[2].startswith('local-dir:'):  # the output of an earlier command
        output_of(*next(c for c in lines('timm-selfconv prune') if f'local-dir:{c[-1]}' == command[2])[1:])
    out = output_of(*(cifar10 if word == DATASET else word for word in command[1:]), '--split', 'test[:100]')
    assert {'eval': 'on 100 images', 'figures': 'attention.png'}[command[1]] in out


@pytest.mark.parametrize('command', lines('python train.py') + lines('torchrun'), ids=lambda c: '-'.join(c[1:5]))
def test_training(command, timm_scripts, cifar10, tmp_path):
    options, launch = command[command.index('train.py') + 1:], [sys.executable]
    options += ['--device', 'cpu', '--no-prefetcher', '--workers', '0', '--batch-size', '2', '--epochs', '1',
                '--warmup-epochs', '0', '--output', str(tmp_path)]
    if '--data-dir' in options:
        options += ['--data-dir', str(fill(tmp_path / 'pictures', ['train/cat', 'train/dog', 'val/cat', 'val/dog']))]
    else:
        options += ['--dataset', f'hfds/{cifar10}', '--train-split', 'train[:4]', '--val-split', 'test[:4]']
    if command[0] == 'torchrun':
        assert command[1] == '--nproc_per_node=8'
        launch += ['-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone']
        options += ['--device-modules', 'timm_selfconv', 'ddp_on_cpu']
    done = subprocess.run([*launch, f'{timm_scripts}/train.py', *options], cwd=REPO, capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(sys.path)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(list(tmp_path.rglob('last.pth.tar'))) == 1


@pytest.mark.parametrize('command', lines('timm-selfconv train'), ids=lambda c: c[2])
def test_fast_training(command, cifar10, tmp_path):
    command = [str(tmp_path / 'run') if word == 'run' else word for word in command]
    cli.main([*command[1:], '--data', cifar10, '--device', 'cpu', 'batch_size=4', 'epochs=1',
              'warmup_epochs=0', 'train_split=train[:4]', 'val_split=test[:4]'])
    assert (tmp_path / 'run' / 'last.pth.tar').is_file()


@pytest.mark.parametrize('command', lines('python -m timm_selfconv run'), ids=lambda c: c[4])
def test_other_scripts(command, timm_scripts, cifar10, tmp_path, as_a_script, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = [os.path.join(timm_scripts, word) if word.endswith('.py') else word for word in command]
    places = {DATASET: f'hfds/{cifar10}', '*_tiny_cifar': 'sa_quadratic_tiny*'}  # one net is enough
    command = [places.get(word, word) for word in command]
    assert command[:3] == ['python', '-m', 'timm_selfconv']
    cli.main([*command[3:], '--no-prefetcher', '--workers', '0', '--split', 'test[:64]'])
    out = capfd.readouterr().out
    if 'bulk_runner.py' in command[4]:
        out = (tmp_path / 'results.csv').read_text()
        assert 'sa_quadratic_tiny_cifar' in out
    assert 'top1' in out
