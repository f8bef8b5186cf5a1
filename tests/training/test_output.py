"""Killed and damaged runs, and runs with another recipe."""
import io
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from filelock import FileLock

from timm_selfconv.training import trainer
from tiny_nets import SMALL

BRIEF = ['--batches', '1', 'epochs=1', SMALL]


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_weights(folder, tmp_path, run):
    more = ['--device', 'cpu', 'amp=false', 'epochs=400', 'drop=0.1', 'model_ema=true', 'mixup=0.2', 'cutmix=1',
            'reprob=0.5', SMALL]
    command = [
        sys.executable, '-m', 'timm_selfconv.train', 'muon_tiny', '--data', str(folder),
        '--output', str(tmp_path / 'killed'), 'batch_size=8', *more]
    environment = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))  # another number rounds otherwise
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as p:
        for _ in range(3):
            assert p.stdout.readline().startswith('epoch ')
        p.kill()
    done = torch.load(tmp_path / 'killed' / 'last.pth.tar', weights_only=True)['epoch']
    assert 1 <= done < 399  # between the line and the file of an epoch, too

    # the schedule knows the number of epochs, so the rest of both is cut short
    killed, whole = (run(tmp_path / output, *more, until=done + 2) for output in ('killed', 'whole'))
    assert killed['epoch'] == whole['epoch'] == done + 2
    for row in (*killed['history'], *whole['history']):
        assert row.pop('images_per_second') > 0  # the only allowed difference
    for key in ('state_dict', 'state_dict_ema', 'history', 'start'):
        torch.testing.assert_close(killed[key], whole[key], rtol=0, atol=0)


def test_other_files_and_trainings_are_left_alone(tmp_path, run, refused):
    """A folder with files but no checkpoint is refused, except for hidden files such as the lock."""
    for name in ('summary.csv', 'history.json', 'notes.txt', 'folder'):
        output = tmp_path / name / 'run'
        output.mkdir(parents=True)
        (output / name).mkdir() if name == 'folder' else (output / name).write_text('mine')
        refused(f'{name}/run exists: remove it or choose another name', output, *BRIEF)
        assert [path.name for path in output.iterdir()] == [name]
    refused('notes.txt exists: remove it', tmp_path / 'notes.txt' / 'run' / 'notes.txt', *BRIEF)
    (tmp_path / 'new').mkdir()
    with FileLock(tmp_path / 'new' / '.lock'):
        refused('another training uses it', tmp_path / 'new', *BRIEF)
    assert run(tmp_path / 'new', *BRIEF)['epoch'] == 0


def test_another_recipe_or_dataset_does_not_resume_a_run(folder, tmp_path, run, refused):
    run(tmp_path / 'run', *BRIEF)
    before = (tmp_path / 'run' / 'last.pth.tar').read_bytes()
    refused(r"run of another recipe \(\['lr'\] differ\)", tmp_path / 'run', *BRIEF, 'lr=0.5')
    shutil.copytree(folder, tmp_path / 'data')
    shutil.copy(tmp_path / 'data' / 'train' / 'airplane' / '0.png', tmp_path / 'data' / 'train' / 'airplane' / '1.png')
    refused(r"\['training images'\] differ", tmp_path / 'run', *BRIEF, data=tmp_path / 'data')
    assert (tmp_path / 'run' / 'last.pth.tar').read_bytes() == before


def test_a_run_without_newer_keys_or_of_another_device_resumes(tmp_path, run):
    checkpoint = run(tmp_path, *BRIEF, 'epochs=3', until=0)
    del checkpoint['data'], checkpoint['args']['position_lr_scale']
    checkpoint['args'].update(kd_temperature=4., torchcompile='inductor')  # of a GPU
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    assert run(tmp_path, *BRIEF, 'epochs=3')['epoch'] == 2


def flip(content):
    """Flip one bit of the largest record, a weight. torch does not check its checksum."""
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        record = records.read(max(records.infolist(), key=lambda info: info.file_size))
    place = content.index(record) + len(record) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1:]


@pytest.mark.parametrize('damage', [lambda content: content[:-1000], flip], ids=['cut', 'flipped bit'])
def test_a_damaged_checkpoint_costs_one_epoch(tmp_path, capsys, run, refused, damage):
    run(tmp_path, *BRIEF, 'epochs=3', until=1)
    path = tmp_path / 'last.pth.tar'
    path.write_bytes(damage(path.read_bytes()))
    whole, resumed = run(tmp_path / 'whole', *BRIEF, 'epochs=3'), run(tmp_path, *BRIEF, 'epochs=3')
    assert 'last.pth.tar cannot be read' in capsys.readouterr().out
    torch.testing.assert_close(resumed['state_dict'], whole['state_dict'], rtol=0, atol=0)
    older = list(tmp_path.glob('checkpoint-*'))
    assert older
    for each in (path, *older):
        each.write_bytes(damage(each.read_bytes()))
    refused('none of its checkpoints can be read', tmp_path, *BRIEF, 'epochs=3')


@pytest.mark.parametrize('change,message', [
    (lambda c: c.pop('steps'), 'has a checkpoint of another program'), (lambda c: c.pop('optimizer'), "'optimizer'"),
    (lambda c: c['state_dict'].pop('stem.bias'), 'Missing key'),
    (lambda c: c['state_dict']['head.fc.bias'].fill_(float('nan')), r'values in head.fc.bias that are not finite')])
def test_incomplete_checkpoints_do_not_resume(tmp_path, run, refused, change, message):
    """A finished run with weights that are not finite is refused too."""
    checkpoint = run(tmp_path, *BRIEF)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    refused(rf'output=.*{message}', tmp_path, *BRIEF)


def test_as_many_checkpoints_stay_as_the_recipe_asks_for(tmp_path, run):
    run(tmp_path, *BRIEF, 'epochs=5', 'checkpoint_hist=3')
    older = {path.name: torch.load(path, weights_only=True)['epoch'] for path in tmp_path.glob('checkpoint-*')}
    assert older == {'checkpoint-2.pth.tar': 2, 'checkpoint-3.pth.tar': 3}


def test_the_first_loss_that_is_not_finite_stops_it(tmp_path, monkeypatch, run, refused):
    def loss(self, *args):
        calls.append(1)
        return whole(self, *args) * (float('nan') if len(calls) == 5 else 1)

    whole, calls, more = trainer.Training.loss, [], ['epochs=3', SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, 'loss', loss)  # three batches an epoch: the second of the second
        refused('epoch 1, step 1: the loss is nan.* keeps the previous epochs', tmp_path / 'run', *more, status=1)
    assert torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)['epoch'] == 0
    resumed, wanted = (run(tmp_path / output, *more)['state_dict'] for output in ('run', 'whole'))
    torch.testing.assert_close(resumed, wanted, rtol=0, atol=0)
