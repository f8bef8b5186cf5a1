"""The words of the command line, and scripts that it runs."""
import json
import subprocess
import sys

import pytest

import timm_selfconv

NET = 'sa_quadratic_tiny_cifar'


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path):
    (tmp_path / 'page.html').touch()
    answers = {  # to a command: what it says
        '--help': 'explore',
        '--version': f'timm-selfconv {timm_selfconv.__version__}',
        'list': 'resvit_cifar',
        'recipe': 'muon_tiny ',
        'recipe paper': '/paper.yaml',
        'recipe paper.yaml': "recipe='paper.yaml'",
        'train --help': 'stem_whitening',
        'train paper --output run nowhere=1': 'does not do',
        'train paper --output run nowhere': 'unrecognized arguments',
        'classify resnet_tinny_cifar x.png': 'did you mean resnet_tiny_cifar',
        'heads vit_tiny_patch16_2244': 'did you mean vit_tiny_patch16_224,',
        'finetune resnet_tinny_cifar pictures --output x': 'did you mean resnet_tiny_cifar',
        f'classify {NET} x.png': 'needs at least one picture file',
        f'heads {NET} --checkpoint x': "'x': needs a weight file",
        f'explore {NET} page.html --out page.html': 'page.html exists',
        f'figures {NET} --out f.pdf': 'becomes a folder',
        f'export {NET} --checkpoint page.html --data x --output . --fact seed': 'needs KEY=VALUE',
        'publish x --owner y': "models=['x']",
    }
    code = """import contextlib, json, sys
from timm_selfconv_cli import main
for command in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        main(command.split())
    print(flush=True)
    print('END', file=sys.stderr)
assert not {'torch', 'timm', 'fvcore'} & set(sys.modules)"""
    done = subprocess.run(
        [sys.executable, '-c', code, json.dumps(list(answers))], cwd=tmp_path, stderr=subprocess.STDOUT, text=True,
        stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stdout
    for said, (command, answer) in zip(done.stdout.split('END'), answers.items()):
        assert answer in said, command


def test_run_registers_the_zoo_for_any_script(tmp_path):
    (tmp_path / 'beside.py').write_text('VALUE = 7')
    script = tmp_path / 'script.py'
    script.write_text(
        'import sys, timm, beside\n'
        'assert __name__ == "__main__"\n'
        'import timm_selfconv\n'
        'timm_selfconv.fuse, timm_selfconv.models.SAN\n'
        'print(timm.is_model(sys.argv[2]), sys.argv[1:], beside.VALUE)\n'
        'sys.exit(3)\n')
    command = [sys.executable, '-m', 'timm_selfconv_cli', 'run', str(script), '--model', NET, '-b', '2']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"True ['--model', '{NET}', '-b', '2'] 7"


@pytest.mark.slow
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
