import json
import os
import subprocess
import sys

import pytest
import timm
from PIL import Image

from timm_selfconv import hub
from timm_selfconv.cli import DEMO_MODEL, main


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


def test_eval(checkpoint, folder, capsys):
    command = ['eval', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder]
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['images'] == 10 and set(result['per_class'].values()) <= {0., 1.}
    main(command)
    out = capsys.readouterr().out
    assert f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f} on 10 images" in out and 'airplane' in out


def test_export_writes_what_it_measured_and_nothing_twice(checkpoint, folder, tmp_path, capsys):
    command = ['export', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder,
               '--output', str(tmp_path / 'out'), '--fact', 'seed=42', '--fact', 'recipe=a=b']
    main(command)
    card = (tmp_path / 'out' / 'sa_quadratic_tiny_cifar.md').read_text()
    assert '| seed | 42 |' in card and '| recipe | a=b |' in card and '(10 images' in card
    with pytest.raises(SystemExit):
        main(command)
    assert 'exists' in capsys.readouterr().err
    assert (tmp_path / 'out' / 'sa_quadratic_tiny_cifar.md').read_text() == card


def test_export_that_fails_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(SystemExit):
        main(['export', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', 'nowhere',
              '--output', str(tmp_path / 'out')])
    assert list((tmp_path / 'out').iterdir()) == []


def test_bench_prints_a_ratio(capsys):
    main(['bench', 'sa_quadratic_tiny_cifar', '--img-size', '8', '--batch-size', '1'])
    out = capsys.readouterr().out
    assert '8 x 8' in out and 'ratio' in out


def test_list_and_tables_for_machines(capsys):
    main(['list', '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert {row['name'] for row in rows} == set(timm.list_models(module=['self_attention', 'resnet_cifar']))
    main(['tables', '--json'])
    assert json.loads(capsys.readouterr().out)


@pytest.mark.skipif(not hub.weights_path(DEMO_MODEL).is_file(), reason=f'{DEMO_MODEL} has no weights here')
def test_demo_on_ones_own_picture(folder, capsys):
    main(['demo', f'{folder}/test/3/picture.png'])
    out = capsys.readouterr().out
    assert 'picture.png' in out and 'Table 1' in out and '12.1M' in out


@pytest.mark.parametrize('command,message', [
    (['classify', 'sa_quadratic_cifar', 'x.png'], 'sa_quadratic_cifar has no trained weights'),
    (['classify', 'no_such_net', 'x.png'], 'no_such_net'),
    (['bench', 'resnet18_cifar'], 'model=ResNetCifar'),
    (['run', 'nowhere.py'], "script='nowhere.py'"),
    (['eval', 'sa_quadratic_tiny_cifar', '--data', '.', '--checkpoint', 'nowhere.safetensors'],
     "checkpoint='nowhere.safetensors'"),
    (['export', 'sa_quadratic_tiny_cifar', '--checkpoint', 'x', '--data', 'y', '--output', 'z', '--fact', 'seed'],
     "fact='seed'"),
])
def test_bad_input_ends_in_one_line(command, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(command)
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and err.count('\n') == 1


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


@pytest.mark.skipif(not os.environ.get('TIMM_SCRIPTS'), reason="TIMM_SCRIPTS names no folder with timm's scripts")
def test_run_validate(checkpoint, folder):
    command = [
        sys.executable, '-m', 'timm_selfconv', 'run', os.path.join(os.environ['TIMM_SCRIPTS'], 'validate.py'),
        '--model', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data-dir', folder, '--split', 'test',
        '--device', 'cpu', '--workers', '0', '--no-prefetcher', '--num-classes', '10']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"top1"' in done.stdout
