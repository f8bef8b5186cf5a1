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

KILLS = int(os.environ.get('KILLS', 4))  # of each command
COMMANDS = {
    'figures': 'figures local-dir:{0}/net --images {0}/red.png --out {1}/figures',
    'explore': 'explore local-dir:{0}/net {0}/red.png --out {1}/page.html',
    'prune': 'prune local-dir:{0}/net --heads 0:1 --output {1}/pruned',
}


def content(folder):
    """Contents by name of the finished files in a folder."""
    names = {str(file.relative_to(folder)): file for file in folder.rglob('*') if file.is_file()}
    return {name: file.read_bytes() for name, file in names.items() if name[0] != '.'}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='needs signals and processes that are forked')
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('name', COMMANDS)
def test_killed_at_any_moment_it_leaves_all_or_nothing_and_runs_again(name, tmp_path):
    model = timm.create_model('sa_quadratic_cifar', depth=1, num_heads=2, embed_dim=8, mlp_dim=8, patch_size=8)
    save_for_hf(model, tmp_path / 'net', safe_serialization=True)
    Image.new('RGB', (32, 32), 'red').save(tmp_path / 'red.png')
    forks, rng = multiprocessing.get_context('forkserver'), random.Random(name)  # of a process without threads
    forks.set_forkserver_preload(['timm_selfconv.cli', 'timm_selfconv.look.explorer', 'timm_selfconv.look.figures'])

    def start(out):
        out.mkdir(exist_ok=True)
        process = forks.Process(target=main, args=(COMMANDS[name].format(tmp_path, out).split(),))
        process.start()
        return process

    def finished(out):
        process = start(out)
        process.join()
        assert process.exitcode == 0
        return content(out)

    finished(tmp_path / 'first')  # starts the server
    begin = time.monotonic()
    wanted = finished(tmp_path / 'whole')
    seconds = time.monotonic() - begin
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
        assert content(out) in (wanted, {}) and (content(out) or finished(out) == wanted)
        unfinished = list(out.glob('.*'))  # by the killed one
        assert len(unfinished) <= 1 and all(path.match('.timm_selfconv-*.tmp') for path in unfinished)
