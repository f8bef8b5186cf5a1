"""Whole runs of recipes and models, and the files that they write."""
import csv
import json

import pytest
import safetensors.torch
import timm
import torch

from timm_selfconv.cli import main as cli
from timm_selfconv.data import class_names
from timm_selfconv.theory import position_blobs
from timm_selfconv.training import trainer
from timm_selfconv.weights import net_caption
from timm_selfconv.weights.history import accuracies, read_history
from tiny_nets import SHALLOW, SMALL


@pytest.mark.parametrize('model', [
    'sa_learned_content_hier_cifar', 'resvit_cifar', 'san_pairwise_hier_cifar', 'san_patchwise_cifar',
    'resnet_tiny_cifar'])
def test_a_net_of_every_family_with_new_classes_is_saved_as_a_folder(own, tmp_path, capsys, run, model):
    more = [f'model={model}', f'model_kwargs={json.dumps(SHALLOW[model])}', 'num_classes=2', 'img_size=16',
            'img_sizes={}', 'epochs=1']
    state = run(tmp_path / 'run', *more, data=own)['state_dict']
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said == f"timm.create_model('local-dir:{tmp_path}/run', pretrained=True)"
    net = timm.create_model(f'local-dir:{tmp_path}/run', pretrained=True)
    torch.testing.assert_close(net.state_dict(), dict(state), rtol=0, atol=0)
    right = read_history(tmp_path / 'run' / 'history.json')['rows'][-1]['eval_top1']
    told = f'from scratch, labels only, 1 epoch, validation accuracy {right:.1f} %'
    assert net_caption(f'local-dir:{tmp_path}/run') == told
    assert class_names(net, 2) == ('ant', 'cow') and net.pretrained_cfg['input_size'] == (3, 16, 16)
    picture, checkpoint = str(next(own.rglob('*.png'))), str(tmp_path / 'run' / 'last.pth.tar')
    for command in ['classify', model, picture], ['export', model, '--data', str(own), '--output', str(tmp_path)]:
        with pytest.raises(SystemExit):
            cli([*command, '--checkpoint', checkpoint])
        assert f'cannot be loaded; use the model local-dir:{tmp_path}/run (Error' in capsys.readouterr().err


def test_a_run_keeps_its_history_and_tells_whole_epochs(tmp_path, monkeypatch, run):
    seen, epoch = [], trainer.Training.epoch
    monkeypatch.setattr(trainer.Training, 'epoch', lambda self: (
        seen.append(position_blobs(self.model, (8, 8))) or epoch(self)))
    run(tmp_path, '--batches', '3', 'epochs=3', 'val_interval=2', 'position_lr_scale=30', 'warmup_epochs=0', SMALL,
        'sched=step', 'decay_epochs=2', 'decay_rate=0.1', 'sched_on_updates=false')  # all batches
    card = (tmp_path / 'README.md').read_text()
    assert '| epochs | 3 |' in card and '| images |' not in card and '--batches' not in card
    history = read_history(tmp_path / 'history.json')
    assert history['model'] == 'sa_quadratic_tiny_cifar' and history['grid'] == [8, 8]
    rows = list(csv.DictReader((tmp_path / 'summary.csv').open()))
    assert [row['train_loss'] for row in history['rows'][1:]] == [float(row['train_loss']) for row in rows]
    assert [bool(row['eval_top1']) for row in rows] == [False, True, True] and all(row['lr'] for row in rows)
    assert [float(row['lr']) for row in rows] == pytest.approx([0.005, 0.005, 0.0005])  # of each epoch, as in train.py
    assert list(accuracies(history)) == [2, 3] and all(row['images_per_second'] > 0 for row in history['rows'][1:])
    for blobs, row in zip(seen, history['rows']):
        for layer, told in zip(blobs, row['heads'], strict=True):
            wanted = torch.cat([layer.centers, layer.covariances.flatten(1)[:, [0, 3, 1]]], 1)
            torch.testing.assert_close(torch.tensor(told, dtype=torch.double), wanted, rtol=1e-3, atol=1e-6)
    assert history['rows'][0]['heads'] != history['rows'][1]['heads']


@pytest.mark.parametrize('recipe,model', [  # the others differ in values
    ('report_san', 'san_pairwise_hier_cifar'), ('half_hour', 'sa_learned_content_hier_cifar'),
    ('muon_tiny', 'san_patchwise_cifar')])
def test_recipes_are_rehearsed(recipe, model, tmp_path, run):
    """Two batches per epoch of a small model, stopped in the middle and resumed."""
    more = ['--batches', '2', f'model={model}', f'model_kwargs={json.dumps(SHALLOW[model])}', 'train_split=train',
            'val_split=test', 'epochs=3', 'img_sizes={0: 16, 2: 32}']
    run(tmp_path, *more, recipe=recipe, until=1)
    checkpoint = run(tmp_path, *more, recipe=recipe)
    assert checkpoint['epoch'] == 2 and checkpoint['arch'] == model
    (tmp_path / 'summary.csv').unlink()  # as after a kill between the last checkpoint and this
    assert run(tmp_path, *more, recipe=recipe)['seconds'] == checkpoint['seconds']
    rows = list(csv.DictReader((tmp_path / 'summary.csv').open()))
    assert list(rows[0]) == ['epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr'] and len(rows) == 3
    card = (tmp_path / 'README.md').read_text()
    assert f'| recipe | {recipe} |' in card and '| image sizes | 16 px from epoch 0, 32 px from epoch 2 |' in card
    assert '| seed | 42 |' in card


def test_a_run_becomes_a_weight_file(folder, tmp_path, monkeypatch, run):
    """With a registered size, which export requires. A card in timm_selfconv/weights loads weights by name."""
    output = tmp_path / 'timm_selfconv'
    ema = run(output, '--batches', '1', 'epochs=1', 'model_ema=true', 'img_sizes={0: 16}')['state_dict_ema']
    monkeypatch.chdir(tmp_path)
    cli(['export', 'sa_quadratic_tiny_cifar', '--checkpoint', f'{output}/last.pth.tar', '--data', str(folder),
         '--output', f'{output}/weights'])
    net = output / 'weights' / 'sa_quadratic_tiny_cifar'
    shipped = safetensors.torch.load_file(net.with_suffix('.safetensors'))
    torch.testing.assert_close(shipped, {k: v.half() for k, v in ema.items()})
    assert net.with_suffix('.history.json').read_bytes() == (output / 'history.json').read_bytes()
    card = net.with_suffix('.md').read_text()
    assert '```text\nbatch_size=8 amp=false epochs=1 model_ema=true' in card and ' --batches 1\n```' in card
    assert '| epochs | 0.3 |' in card and "create_model('sa_quadratic_tiny_cifar.cifar10', pretrained=True)" in card
    assert [row['epochs'] for row in read_history(net.with_suffix('.history.json'))['rows']] == [0, 8 / 24]
    assert '| images | 8: 1 x 1 batches of 8 |\n' in card and '| image sizes | 16 px from epoch 0 |\n' in card
    assert '| teacher | none |\n' in card and '| initialised from | none |\n' in card
    assert '| weights | moving average, decay 0.9998 |' in card and 'validation accuracy' not in card
    assert f'| data | {folder.name}, split train |\n' in card and 'CIFAR' not in card
