"""Commands that are killed at a random moment leave complete files or none, and run again."""
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import safetensors.torch
import timm
from PIL import Image
from timm.models import save_for_hf

from pictures import fill
from timm_selfconv.models._cfg import CIFAR10_CLASSES
from timm_selfconv.cli import main
from timm_selfconv.files import sha256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != 'linux', reason='needs signals and processes that are forked')]
KILLS = 100 if os.environ.get('HYPOTHESIS_PROFILE') == 'deep' else 4  # of each command


@pytest.fixture(scope='module')
def forks():
    """A server process without threads that has imported everything, and forks processes."""
    forks = multiprocessing.get_context('forkserver')
    forks.set_forkserver_preload(['timm_selfconv.cli', 'timm_selfconv.weights.saving', 'timm_selfconv.look.explorer',
                                  'timm_selfconv.look.figures', 'timm_selfconv.measure.evaluation'])
    return forks


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a small net, its weights, a picture and data."""
    folder = tmp_path_factory.mktemp('kills')
    model = timm.create_model('sa_quadratic_cifar', depth=1, num_heads=2, embed_dim=8, mlp_dim=8, patch_size=8)
    save_for_hf(model, folder / 'net', safe_serialization=True)
    full = timm.create_model('sa_quadratic_tiny_cifar')
    safetensors.torch.save_file(full.state_dict(), folder / 'full.safetensors')
    fill(folder / 'data' / 'test', CIFAR10_CLASSES)
    Image.new('RGB', (32, 32), 'red').save(folder / 'red.png')
    return folder


def content(path):
    """Return checksums by name of the complete files in a folder."""
    files = [file for file in path.rglob('*') if file.is_file() and '/.' not in str(file.relative_to(path.parent))]
    return {str(file.relative_to(path)): sha256(file) for file in files}


COMMANDS = {
    'figures': ['figures', 'local-dir:{inputs}/net', '--images', '{inputs}/red.png', '--out', '{out}/figures'],
    'explore': ['explore', 'local-dir:{inputs}/net', '{inputs}/red.png', '--out', '{out}/page.html'],
    'prune': ['prune', 'local-dir:{inputs}/net', '--heads', '0:1', '--output', '{out}/pruned'],
    'export': ['export', 'sa_quadratic_tiny_cifar', '--checkpoint', '{inputs}/full.safetensors',
               '--data', '{inputs}/data', '--output', '{out}'],
}


@pytest.mark.parametrize('name', COMMANDS)
@pytest.mark.timeout(3600)
def test_killed_at_any_moment_it_leaves_all_or_nothing_and_runs_again(name, forks, folder, tmp_path):
    rng = random.Random(name)

    def start(out):
        out.mkdir(exist_ok=True)
        process = forks.Process(target=main, args=([word.format(out=out, inputs=folder) for word in COMMANDS[name]],))
        process.start()
        return process

    begin = time.monotonic()
    whole = start(tmp_path / 'whole')
    whole.join()
    seconds = time.monotonic() - begin
    assert whole.exitcode == 0
    wanted = content(tmp_path / 'whole')
    assert wanted

    for number in range(KILLS):
        out = tmp_path / str(number)
        process = start(out)
        if number % 2:  # while it writes
            while not any(out.iterdir()) and process.is_alive():
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
        else:
            process.join(rng.random() * seconds)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        left = content(out)
        done = left == wanted
        if name == 'export':  # weights are written last; a card and a checksum alone are harmless
            assert left.items() <= wanted.items() and (done or 'sa_quadratic_tiny_cifar.safetensors' not in left)
        else:
            assert done or not left
        if not done:
            again = start(out)
            again.join()
            assert again.exitcode == 0 and content(out) == wanted
            left = list(out.glob('.*'))  # by the killed one
            assert len(left) <= 1 and all(path.match('.timm_selfconv-*.tmp') for path in left)
