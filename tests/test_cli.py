"""The words of the command line, and scripts that it runs."""
import subprocess
import sys

import pytest


def imported(*command):
    """Modules that the command line has imported in the end."""
    code = 'import sys; sys.argv[0] = "timm-selfconv"; from timm_selfconv_cli import main\ntry: main()\n' \
        'finally: print(*sys.modules, file=sys.stderr)'
    return subprocess.run([sys.executable, '-c', code, *command], capture_output=True, text=True)


def test_help_does_not_wait_for_torch():
    done = imported('--help')
    assert 'explore' in done.stdout and not {'torch', 'timm', 'fvcore'} & set(done.stderr.split())
    assert 'did you mean' in imported('classify', 'resnet_tinny_cifar', 'x.png').stderr  # the zoo is there if need be


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
