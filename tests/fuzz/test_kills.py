"""Commands that are killed at any moment leave all or nothing, and can be run again."""
import multiprocessing
import os
import random
import sys
import time

import pytest
import timm
from PIL import Image
from timm.models import save_for_hf

from timm_selfconv.cli import main
from timm_selfconv.files import sha256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != 'linux', reason='needs signals and processes that are forked')]
KILLS = int(os.environ.get('KILLS', 4))  # of each command
COMMANDS = {
    'figures': ['figures', 'local-dir:{inputs}/net', '--images', '{inputs}/red.png', '--out', '{out}/figures'],
    'explore': ['explore', 'local-dir:{inputs}/net', '{inputs}/red.png', '--out', '{out}/page.html'],
    'prune': ['prune', 'local-dir:{inputs}/net', '--heads', '0:1', '--output', '{out}/pruned'],
}


@pytest.fixture(scope='module')
def forks():
    """A server process without threads that has imported everything, and forks processes."""
    forks = multiprocessing.get_context('forkserver')
    forks.set_forkserver_preload(['timm_selfconv.cli', 'timm_selfconv.look.explorer', 'timm_selfconv.look.figures'])
    return forks


def content(path):
    """Checksums by name of the finished files in a folder."""
    files = [file for file in path.rglob('*') if file.is_file() and '/.' not in str(file.relative_to(path.parent))]
    return {str(file.relative_to(path)): sha256(file) for file in files}


@pytest.mark.parametrize('name', COMMANDS)
@pytest.mark.timeout(3600)
def test_killed_at_any_moment_it_leaves_all_or_nothing_and_runs_again(name, forks, tmp_path):
    model = timm.create_model('sa_quadratic_cifar', depth=1, num_heads=2, embed_dim=8, mlp_dim=8, patch_size=8)
    save_for_hf(model, tmp_path / 'net', safe_serialization=True)
    Image.new('RGB', (32, 32), 'red').save(tmp_path / 'red.png')
    rng = random.Random(name)

    def start(out):
        out.mkdir(exist_ok=True)
        words = [word.format(out=out, inputs=tmp_path) for word in COMMANDS[name]]
        process = forks.Process(target=main, args=(words,))
        process.start()
        return process

    begin = time.monotonic()
    whole = start(tmp_path / 'whole')
    whole.join()
    seconds, wanted = time.monotonic() - begin, content(tmp_path / 'whole')
    assert whole.exitcode == 0 and wanted

    for number in range(KILLS):
        out = tmp_path / str(number)
        process = start(out)
        if number % 2:  # while it writes
            while not any(out.iterdir()) and process.is_alive():
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
        else:
            process.join(rng.random() * seconds)
        process.kill()
        process.join()
        left = content(out)
        assert left in (wanted, {})
        if not left:
            again = start(out)
            again.join()
            assert again.exitcode == 0 and content(out) == wanted
            unfinished = list(out.glob('.*'))  # by the killed one
            assert len(unfinished) <= 1 and all(path.match('.timm_selfconv-*.tmp') for path in unfinished)
