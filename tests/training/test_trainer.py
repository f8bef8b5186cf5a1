"""The fast training script, against torch's, timm's and PIL's own."""
import csv
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import timm.loss
import timm.task
import torch
import torch.nn.functional as F
import yaml
from filelock import FileLock
from PIL import Image
from timm.data import create_transform

from timm_selfconv import hub, train
from timm_selfconv.data import at_size, class_names, load_images, open_dataset
from timm_selfconv.models import CIFAR10_CLASSES, zoo_names
from timm_selfconv.cli import main as cli
from timm_selfconv.theory import position_blobs
from timm_selfconv.training import trainer
from timm_selfconv.training.augment import Augment
from timm_selfconv.training.recipes import read_recipe
from timm_selfconv.weights.history import accuracies, read_history

RECIPES = Path(__file__).resolve().parent.parent.parent / 'recipes'
TINY = str(RECIPES / 'muon_tiny.yaml')
LIKE_TIMM = ['crop_padding=null', 'img_sizes={}']  # crops and image sizes as train.py has them


def noise(folder, *labels, size=(32, 32)):
    """Pictures in the layout of timm's image folders: of each class 12 to train on and 3 to test."""
    rng = np.random.default_rng(0)
    for split, n in (('train', 12), ('test', 3)):
        for label in labels:
            (folder / split / label).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f'{i}.png')
    return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return noise(tmp_path_factory.mktemp('noise'), 'airplane', 'automobile')  # eval matches them by name


@pytest.fixture(scope='module')
def own(tmp_path_factory):
    """Classes that no net has, pictures of another size and shape."""
    return noise(tmp_path_factory.mktemp('own'), 'cow', 'ant', size=(40, 50))


SMALL = 'model_kwargs={embed_dim: 8, mlp_dim: 8, depth: 2}'


def split(folder, name):
    return open_dataset(str(folder), name, None, 'img', 'label')


def run(folder, output, *more, recipe=TINY):
    train.main([str(recipe), '--data', str(folder), '--output', str(output), *more, 'batch_size=8'])
    return torch.load(output / 'last.pth.tar', weights_only=True)


def refused(capsys, status, message, *command):
    with pytest.raises(SystemExit) as stopped:
        run(*command)
    error = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == status and re.search(message, error), error


@contextmanager
def stopped_after(epoch):
    """A training that ends between the checkpoint of an epoch, counted from 0, and what follows from it."""
    class Enough(Exception):
        pass

    def publish(self, *args):
        if len(self.history) > epoch:
            raise Enough
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
        patch.setattr(trainer.Training, 'publish', publish)
        yield


@pytest.mark.parametrize('more,message', [
    (['batch_size=100'], r'batch_size=100: needs at most the 24 training images'),
    (['batch_size=8', 'model_kwargs={num_classes: 1}'], r'largest label 1: .* has 1 classes'),
    (['batch_size=8', 'model_kwargs={heads: 1}'], r'model=.*heads'),
    (['batch_size=8', 'train_split=nowhere'], r'nowhere'),
    (['batch_size=8', 'model=sa_quadratic'], r"model='sa_quadratic', .* Unknown model"),
    (['batch_size=8', 'initial_checkpoint=nowhere.safetensors'], r'nowhere.safetensors'),
    (['batch_size=8', 'kd_model_name=sa_learned_h16_cifar'], r'has no trained weights yet'),
    (['batch_size=8', 'kd_maps={0: 1}'], r'kd_maps={0: 1}: layer 1, .* its teacher \(kd_model_name\) has 0'),
    (['batch_size=8', 'kd_model_name=resnet_tiny_cifar', 'kd_maps={9: 1}'], r'kd_maps={9: 1}: layer 9, .* net has 6'),
    (['batch_size=8', 'img_sizes={5: 18}'], r'18.*multiples of 4'),
    (['batch_size=8', '--device', 'abacus'], r"device='abacus': .*abacus"),
    (['batch_size=8', '--device', 'meta'], r"device='meta': "),
    (['batch_size=8', '--batches', '0'], r"--batches: 0: needs a whole number above 0"),
    (['batch_size=8', '--batches', '-1'], r"--batches: -1: needs"),
    (['batch_size=8', 'opt=adahessian'], r"opt='adahessian': needs second derivatives"),
    (['batch_size=8', 'opt=foo'], r"opt='foo': "),
    (['batch_size=8', 'torchcompile=foo'], r"torchcompile='foo': "),
    (['batch_size=8', 'initial_checkpoint=/etc/passwd'], r"initial_checkpoint='/etc/passwd'"),
    (['batch_size=8', 'device_modules=[nowhere]'], r"device_modules=\['nowhere'\]: No module"),
    (['batch_size=8', 'device_modules=[7]'], r"device_modules=\[7\]: "),
])
def test_data_that_does_not_fit_is_refused(folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as stopped:
        train.main([TINY, '--data', str(folder), '--output', str(tmp_path), *more])
    assert stopped.value.code == 2 and re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('column', ['input_key', 'target_key'])
def test_missing_columns_are_refused(tmp_path, capsys, column):
    datasets = pytest.importorskip('datasets')
    pictures = dict(img=[Image.new('RGB', (32, 32))] * 8, label=[0] * 8)
    datasets.Dataset.from_dict(pictures).to_parquet(tmp_path / 'data' / 'train-00000-of-00001.parquet')
    refused(capsys, 2, f"{column}='nowhere'", tmp_path / 'data', tmp_path / 'run', f'{column}=nowhere')


def test_images_are_normalised_as_timm_does(folder):
    args = read_recipe(TINY, [*LIKE_TIMM, 'hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]'])
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8)
    augment = Augment(args, model, torch.device('cpu'))
    images, labels = load_images(split(folder, 'test'), model, torch.device('cpu'))
    assert images.dtype == torch.uint8 and labels.tolist() == [0, 0, 0, 1, 1, 1]
    transform = create_transform(**timm.data.resolve_data_config({}, model=model))
    wanted = torch.stack([transform(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images])
    torch.testing.assert_close(augment.normalize(images), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(augment(images), wanted, rtol=0, atol=1e-5)


def test_classes_are_the_net_s_by_name(tmp_path, own, capsys):
    known, run = noise(tmp_path / 'data', 'truck', 'cat'), tmp_path / 'run'
    train_set, test_set = (split(known, name) for name in ('train', 'test'))
    trainer.create_net(read_recipe(TINY, [SMALL]), train_set, test_set)
    assert [label for _, label in test_set] == [3] * 3 + [9] * 3 and train_set[0][1] == 3
    refused(capsys, 2, r"dataset's are \['ant', 'cow'\], the model's .* key num_classes=2", own, run, SMALL)
    refused(capsys, 2, r"num_classes=3: the training images have 2, \('ant', 'cow'\)", own, run, 'num_classes=3')
    assert not run.exists()


@pytest.mark.parametrize('name,count', [('resnet_tiny_cifar', 2), ('sa_quadratic_tiny_cifar', 10)])
def test_other_classes_get_a_new_classifier(name, count):
    """Behind the weights that the net has, even if there are as many of them."""
    names = [f'class {i}' for i in range(count)]
    dataset = SimpleNamespace(class_to_idx={name: i for i, name in enumerate(names)})
    keys = [f'model={name}', 'pretrained=true', f'num_classes={count}']
    ours, trained = trainer.create_net(read_recipe(TINY, keys), dataset), timm.create_model(name, pretrained=True)
    states = ours.state_dict(), trained.state_dict()
    assert all(torch.equal(states[0][k], v) == ('fc.' not in k) for k, v in states[1].items())
    assert class_names(ours, count) == tuple(names) and ours(torch.zeros(1, 3, 32, 32)).shape == (1, count)
    dataset.class_to_idx = dict(zip(CIFAR10_CLASSES, range(10)))
    kept = trainer.create_net(read_recipe(TINY, [*keys[:2], 'num_classes=10']), dataset).state_dict()
    torch.testing.assert_close(kept, trained.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('model', ['resnet_tiny_cifar', 'resvit_cifar'])
def test_a_net_with_classes_of_its_own_is_a_folder_of_its_own(own, tmp_path, capsys, model):
    small = 'model_kwargs={channels: [8, 8, 8, 8]}' if model.startswith('resnet') else SMALL
    more = [f'model={model}', small, 'num_classes=2', 'img_size=16', 'img_sizes={}', 'epochs=1']
    (tmp_path / 'README.md').write_text('mine')
    refused(capsys, 2, 'exists: remove it or choose another', own, tmp_path, *more)
    state = run(own, tmp_path / 'run', *more)['state_dict']
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said == f"timm.create_model('local-dir:{tmp_path}/run', pretrained=True)"
    net = timm.create_model(f'local-dir:{tmp_path}/run', pretrained=True)
    torch.testing.assert_close(net.state_dict(), dict(state), rtol=0, atol=0)
    assert class_names(net, 2) == ('ant', 'cow') and net.pretrained_cfg['input_size'] == (3, 16, 16)
    assert (tmp_path / 'README.md').read_text() == 'mine'
    picture, checkpoint = str(next(own.rglob('*.png'))), str(tmp_path / 'run' / 'last.pth.tar')
    for command in ['classify', model, picture], ['export', model, '--data', str(own), '--output', str(tmp_path)]:
        with pytest.raises(SystemExit):
            cli([*command, '--checkpoint', checkpoint])
        assert f'cannot be loaded, take local-dir:{tmp_path}/run instead (Error' in capsys.readouterr().err


def test_bfloat16_is_for_processors_that_have_it(folder, tmp_path, capsys, monkeypatch):
    more = ['--batches', '1', 'epochs=1', SMALL]
    monkeypatch.setattr(torch.cpu, 'get_capabilities', dict, raising=False)
    assert run(folder, tmp_path, *more)['amp'] is False
    assert 'trains in float32: this CPU has no arithmetic for bfloat16\n' in capsys.readouterr().out
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: dict(avx512_bf16=True), raising=False)
    assert small_training(folder, 'amp=true').amp and not small_training(folder).amp
    refused(capsys, 2, r"run of another recipe \(\['precision'\] differ\)", folder, tmp_path, *more)


def test_one_step_is_that_of_torch_s_optimiser(folder):
    """Augmentation off, one batch of all images: its order does not matter."""
    args = read_recipe(TINY, [
        *LIKE_TIMM, 'hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]', 'amp=null', 'opt=momentum', 'lr=0.5',
        'sched_on_updates=true', 'warmup_epochs=0', 'batch_size=24', 'epochs=2', 'clip_grad=0.1', SMALL])
    net = trainer.create_net(args, dataset := split(folder, 'train'))
    data = load_images(dataset, net, torch.device('cpu'))
    training = trainer.Training(args, net, data)
    torch.manual_seed(args.seed)
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8, mlp_dim=8, depth=2)
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=0, atol=0)

    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith('encoding.centers')]
    rest = [p for n, p in model.named_parameters() if p.dim() <= 1 or n.endswith('encoding.centers')]
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0.)]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    criterion = timm.loss.LabelSmoothingCrossEntropy(args.smoothing)
    loss = criterion(model(training.augment.normalize(data[0])), data[1])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()

    assert one_epoch(training) == pytest.approx(loss.item(), rel=1e-5)
    assert training.optimizer.param_groups[0]['lr'] == pytest.approx(0.25)  # half of the cosine
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)


def test_killed_and_resumed_it_ends_with_the_same_weights(folder, tmp_path):
    more = ['--device', 'cpu', 'amp=false', 'epochs=400', 'drop=0.1', 'model_ema=true', 'mixup=0.2', 'cutmix=1',
            'reprob=0.5', SMALL]
    command = [
        sys.executable, '-m', 'timm_selfconv.train', TINY, '--data', str(folder),
        '--output', str(tmp_path / 'killed'), *more, 'batch_size=8']
    environment = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))  # another number rounds otherwise
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as p:
        for _ in range(3):
            assert p.stdout.readline().startswith('epoch ')
        p.send_signal(signal.SIGKILL)
    done = torch.load(tmp_path / 'killed' / 'last.pth.tar', weights_only=True)['epoch']
    assert 1 <= done < 399  # between the line and the file of an epoch, too

    for output in ('killed', 'whole'):  # the schedule knows the number of epochs, so the rest of both is cut short
        with stopped_after(done + 2):
            run(folder, tmp_path / output, *more)
    killed, whole = (torch.load(tmp_path / o / 'last.pth.tar', weights_only=True) for o in ('killed', 'whole'))
    assert killed['epoch'] == whole['epoch'] == done + 2
    for row in (*killed['history'], *whole['history']):
        assert row.pop('images_per_second') > 0  # the only thing that may differ
    for key in ('state_dict', 'state_dict_ema', 'history', 'start'):
        torch.testing.assert_close(killed[key], whole[key], rtol=0, atol=0)


def test_another_recipe_or_other_data_do_not_go_on_with_a_run(folder, tmp_path, capsys):
    more = ['--batches', '1', 'epochs=1', SMALL]
    run(folder, tmp_path / 'run', *more)
    before = (tmp_path / 'run' / 'last.pth.tar').read_bytes()
    refused(capsys, 2, r"run of another recipe \(\['lr'\] differ\)", folder, tmp_path / 'run', *more, 'lr=0.5')
    shutil.copytree(folder, tmp_path / 'data')
    shutil.copy(tmp_path / 'data' / 'train' / 'airplane' / '0.png', tmp_path / 'data' / 'train' / 'airplane' / '1.png')
    refused(capsys, 2, r"\['training images'\] differ", tmp_path / 'data', tmp_path / 'run', *more)
    assert (tmp_path / 'run' / 'last.pth.tar').read_bytes() == before


def test_a_run_from_before_new_keys_goes_on(folder, tmp_path):
    more = ['--batches', '1', 'epochs=3', SMALL]
    with stopped_after(0):
        run(folder, tmp_path, *more)
    checkpoint = torch.load(tmp_path / 'last.pth.tar', weights_only=True)
    for entries, key in (
            (checkpoint, 'data'), (checkpoint, 'kd_heads'),
            (checkpoint['args'], 'kd_temperature'), (checkpoint['args'], 'grad_accum_steps')):
        del entries[key]
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    assert run(folder, tmp_path, *more)['epoch'] == 2


def cut(size):
    return lambda content: content[:size]


def flip(content):
    """One bit of the largest record: weights, which torch reads without a look at their checksum."""
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        record = records.read(max(records.infolist(), key=lambda info: info.file_size))
    place = content.index(record) + len(record) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1:]


@pytest.mark.parametrize('damage', [cut(0), cut(1000), cut(-1000), flip], ids=[
    'empty', 'short', 'nearly whole', 'a bit'])
def test_a_damaged_checkpoint_costs_one_epoch(folder, tmp_path, capsys, damage):
    more = ['--batches', '1', 'epochs=3', SMALL]
    with stopped_after(1):
        run(folder, tmp_path, *more)
    last, previous = tmp_path / 'last.pth.tar', tmp_path / 'checkpoint-0.pth.tar'
    last.write_bytes(damage(last.read_bytes()))
    whole = run(folder, tmp_path / 'whole', *more)
    resumed = run(folder, tmp_path, *more)
    assert 'last.pth.tar is damaged' in capsys.readouterr().out
    torch.testing.assert_close(resumed['state_dict'], whole['state_dict'], rtol=0, atol=0)
    for path in (last, *tmp_path.glob('checkpoint-*')):
        path.write_bytes(damage(path.read_bytes()))
    assert previous.is_file() or previous.with_name('checkpoint-1.pth.tar').is_file()
    refused(capsys, 2, 'no checkpoint in it is whole', folder, tmp_path, *more)


@pytest.mark.parametrize('content,message', [
    (dict(state_dict={}), 'has a checkpoint that timm_selfconv.train did not write'),
    ([1, 2], 'did not write'), (torch.zeros(3), 'did not write')])
def test_other_checkpoints_do_not_resume(folder, tmp_path, capsys, content, message):
    torch.save(content, tmp_path / 'last.pth.tar')
    refused(capsys, 2, message, folder, tmp_path, 'epochs=1', SMALL)


@pytest.mark.parametrize('change,message', [
    (lambda c: c.pop('optimizer'), "'optimizer'"), (lambda c: c['state_dict'].pop('stem.bias'), 'Missing key'),
    (lambda c: c['state_dict'].update({'stem.bias': torch.zeros(3)}), 'size mismatch'),
    (lambda c: c['args'].pop('model'), "run of another recipe.*'model'")])
def test_checkpoints_with_something_missing_do_not_resume(folder, tmp_path, capsys, change, message):
    more = ['--batches', '1', 'epochs=1', SMALL]
    checkpoint = run(folder, tmp_path, *more)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    refused(capsys, 2, rf'output=.*{message}', folder, tmp_path, *more)


def test_weights_that_are_not_finite_do_not_count_as_a_finished_run(folder, tmp_path, capsys):
    more = ['--batches', '1', 'epochs=1', SMALL]
    checkpoint = run(folder, tmp_path, *more)
    checkpoint['state_dict']['head.fc.bias'].fill_(float('nan'))
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    refused(capsys, 2, r'values in head.fc.bias that are not finite', folder, tmp_path, *more)


@pytest.mark.parametrize('kept', [1, 2, 4])
def test_as_many_checkpoints_stay_as_the_recipe_asks_for(folder, tmp_path, kept):
    run(folder, tmp_path, '--batches', '1', 'epochs=5', f'checkpoint_hist={kept}', SMALL)
    older = {path.name: torch.load(path, weights_only=True)['epoch'] for path in tmp_path.glob('checkpoint-*')}
    assert older == {f'checkpoint-{epoch}.pth.tar': epoch for epoch in range(4)[4 - (kept - 1):]}


def test_a_run_keeps_its_history(folder, tmp_path, monkeypatch):
    seen = []
    epoch = trainer.Training.epoch

    def observed(self, scheduler):
        seen.append(position_blobs(self.model, (8, 8)))
        return epoch(self, scheduler)

    monkeypatch.setattr(trainer.Training, 'epoch', observed)
    shards = ['--shards', str(tmp_path / 'out')]
    run(folder, tmp_path, *shards, 'epochs=3', 'val_interval=2', 'position_lr_scale=30', SMALL)
    history = read_history(tmp_path / 'history.json')
    assert read_history(tmp_path / 'out' / 'history.json') == history
    assert history['model'] == 'sa_quadratic_tiny_cifar' and history['grid'] == [8, 8]
    rows = list(csv.DictReader((tmp_path / 'summary.csv').open()))
    assert [row['train_loss'] for row in history['rows'][1:]] == [float(row['train_loss']) for row in rows]
    assert list(accuracies(history)) == [2, 3] and all(row['images_per_second'] > 0 for row in history['rows'][1:])
    for blobs, row in zip(seen, history['rows']):
        for layer, told in zip(blobs, row['heads'], strict=True):
            wanted = torch.cat([layer.centers, layer.covariances.flatten(1)[:, [0, 3, 1]]], 1)
            torch.testing.assert_close(torch.tensor(told, dtype=torch.double), wanted, rtol=1e-3, atol=1e-6)
    assert history['rows'][0]['heads'] != history['rows'][1]['heads']


def test_position_encodings_learn_at_their_own_rate(folder):
    still = ['hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]', 'opt=momentum', 'warmup_epochs=0', 'batch_size=24', 'epochs=2',
             'lr=0.5']
    plain, scaled = (small_training(folder, *still, f'position_lr_scale={s}') for s in (1, 30))
    starts = [{k: v.clone() for k, v in t.model.state_dict().items()} for t in (plain, scaled)]
    torch.testing.assert_close(*starts, rtol=0, atol=0)
    for training in (plain, scaled):
        one_epoch(training)
    for name in starts[0]:
        steps = [t.model.state_dict()[name] - start[name] for t, start in zip((plain, scaled), starts)]
        factor = 30. if '.encoding.' in name else 1.
        torch.testing.assert_close(steps[1], factor * steps[0], rtol=1e-3, atol=1e-5)


def test_the_stem_begins_with_whitened_patches_of_the_first_size(folder, tmp_path, capsys):
    training = small_training(folder, 'stem_whitening=0.5', 'img_sizes={0: 16}')
    images = at_size(training.augment.normalize(training.images), 16)
    out = training.model.stem(images).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), torch.zeros(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.cov(), 0.25 * torch.eye(8), rtol=0, atol=1e-2)
    torch.save(training.model.state_dict(), tmp_path / 'net.pth')
    refused(capsys, 2, 'stem_whitening=0.5: needs a net from scratch', folder, tmp_path / 'run', 'stem_whitening=0.5',
            f'initial_checkpoint={tmp_path}/net.pth', SMALL)


def test_one_training_a_folder(folder, tmp_path, capsys):
    with FileLock(tmp_path / '.lock'):
        refused(capsys, 2, 'another training runs there', folder, tmp_path, 'epochs=1', SMALL)
    assert run(folder, tmp_path, 'epochs=1', SMALL)['epoch'] == 0


def test_the_first_loss_that_is_not_finite_stops_it(folder, tmp_path, capsys, monkeypatch):
    def loss(self, *args):
        calls.append(1)
        return whole(self, *args) * (float('nan') if len(calls) == 5 else 1)

    whole, calls, more = trainer.Training.loss, [], ['epochs=3', SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, 'loss', loss)  # three batches an epoch: the second of the second
        message = 'epoch 1, step 1: the loss is nan.* keeps the epochs before'
        refused(capsys, 1, message, folder, tmp_path / 'run', *more)
    assert torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)['epoch'] == 0
    resumed, wanted = (run(folder, tmp_path / output, *more)['state_dict'] for output in ('run', 'whole'))
    torch.testing.assert_close(resumed, wanted, rtol=0, atol=0)


def small_training(folder, *overrides):
    args = read_recipe(TINY, [*LIKE_TIMM, 'batch_size=8', 'amp=null', SMALL, *overrides])
    net = trainer.create_net(args, dataset := split(folder, 'train'))
    return trainer.Training(args, net, load_images(dataset, net, torch.device('cpu')))


def one_epoch(training):
    args = training.args
    scheduler, _ = trainer.create_scheduler_v2(
        training.optimizer, **trainer.scheduler_kwargs(args), updates_per_epoch=training.steps)
    return training.epoch(scheduler)


def test_small_images_first_and_validation_at_full_size(folder):
    training, seen = small_training(folder, 'img_sizes={1: 16, 3: 24}', 'epochs=5'), []
    training.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    for _ in range(4):
        one_epoch(training)
        training.validate((training.images, training.labels))
        training.history.append({})
    assert seen == [32] * 4 + [16, 16, 16, 32] * 2 + [24, 24, 24, 32]


@pytest.mark.parametrize('weights', [{}, dict(distill_loss_weight=0.7), dict(task_loss_weight=0.3), dict(
    task_loss_weight=0.2, distill_loss_weight=2.0)])
def test_distillation_is_that_of_timm_s_train_py(folder, weights):
    training = small_training(
        folder, 'kd_model_name=resnet_tiny_cifar', 'kd_temperature=3', *(f'{k}={v}' for k, v in weights.items()))
    x = training.augment(training.images)
    task = timm.task.LogitDistillationTask(
        training.model, timm.create_model('resnet_tiny_cifar', pretrained=True),
        torch.nn.CrossEntropyLoss(label_smoothing=training.args.smoothing), temperature=3., **weights)
    wanted = task(x, training.labels)['loss']
    torch.testing.assert_close(training.loss(x, training.labels, None), wanted)
    seen = []
    training.teacher.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    before = {k: v.clone() for k, v in training.teacher.state_dict().items()}
    training.args.img_sizes = {0: 16}
    one_epoch(training)
    assert {x.shape[-1] for x in seen} == {32}  # the same crop at full size, whatever the net sees
    torch.testing.assert_close(training.teacher.state_dict(), before, rtol=0, atol=0)


def test_maps_of_the_teacher_s_stages_are_learned_too(folder):
    teacher = ['kd_model_name=resnet_tiny_cifar', 'img_sizes={0: 24}']
    training = small_training(folder, *teacher, 'kd_maps={1: 3}', 'kd_maps_weight=2.5')
    x = training.augment(training.images)
    with torch.no_grad():
        ours = training.model.forward_intermediates(at_size(x, 24), indices=[1], intermediates_only=True)[0]
        theirs = training.teacher.model.forward_intermediates(x, indices=[3], intermediates_only=True)[0]
        theirs = torch.nn.BatchNorm2d(64, affine=False)(F.adaptive_avg_pool2d(theirs, 6))  # 8 x 8, for 6 x 6 patches
        maps = (training.student.heads[0](ours) - theirs).square().mean()
    without = small_training(folder, *teacher).loss(x, training.labels, 24)
    torch.testing.assert_close(training.loss(x, training.labels, 24), without + 2.5 * maps)
    before = training.student.heads[0].weight.clone()
    one_epoch(training)
    assert not torch.equal(training.student.heads[0].weight, before)
    assert training.checkpoint()['state_dict'].keys() == training.model.state_dict().keys()


def test_a_net_that_learns_maps_goes_on_with_its_linear_layers(folder, tmp_path):
    more = ['epochs=2', 'opt=muon', 'kd_model_name=resnet_tiny_cifar', 'kd_maps={0: 2, 1: 4}', SMALL]
    with stopped_after(0):
        run(folder, tmp_path / 'killed', *more)
    killed, whole = (run(folder, tmp_path / output, *more) for output in ('killed', 'whole'))
    for key in ('state_dict', 'kd_heads'):
        torch.testing.assert_close(killed[key], whole[key], rtol=0, atol=0)
    torch.testing.assert_close(killed['optimizer']['state'], whole['optimizer']['state'], rtol=0, atol=0)


def test_gradients_add_up_over_batches(folder):
    """No BatchNorm, no augmentation: 24 images at once, or eight and again eight and again eight."""
    still = ['hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]', 'epochs=2', 'warmup_epochs=0', 'opt=momentum']
    at_once = small_training(folder, *still, 'batch_size=24')
    in_parts = small_training(folder, *still, 'grad_accum_steps=3')
    broken = small_training(folder, *still, 'batch_size=5', 'grad_accum_steps=3')  # of 5, 5, 5, and of the one left
    assert [at_once.steps, in_parts.steps, broken.steps] == [1, 1, 2]
    assert one_epoch(in_parts) == pytest.approx(one_epoch(at_once), rel=1e-5)
    torch.testing.assert_close(in_parts.model.state_dict(), at_once.model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('recipe', sorted(RECIPES.glob('*.yaml')), ids=lambda path: path.stem)
def test_every_recipe_is_rehearsed(recipe, folder, tmp_path, capsys, monkeypatch):
    """Two batches of each of its phases, stopped in the middle, resumed and exported; its nets have a test below."""
    phases = yaml.safe_load(recipe.read_text()).get('img_sizes', {})
    more = ['--batches', '2', 'model=sa_quadratic_tiny_cifar', 'aa=null', 'val_split=test',
            f'epochs={max(3, len(phases))}', f'img_sizes={dict(enumerate(phases.values()))}']
    with stopped_after(1):
        run(folder, tmp_path / 'run', *more, recipe=recipe)
    assert run(folder, tmp_path / 'run', *more, recipe=recipe)['epoch'] == max(3, len(phases)) - 1
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    cli(command[1:])
    facts = (tmp_path / 'run/weights/sa_quadratic_tiny_cifar.md').read_text()
    assert f'| recipe | {recipe} |' in facts and ('| image sizes |' in facts) == bool(phases)


def test_what_is_validated_how_often(folder, tmp_path):
    run(folder, tmp_path, '--batches', '1', 'epochs=5', 'val_interval=2', SMALL)
    rows = list(csv.DictReader((tmp_path / 'summary.csv').open()))
    assert [bool(row['eval_top1']) for row in rows] == [False, True, False, True, True]
    assert all(row['train_loss'] and row['lr'] for row in rows)


@pytest.mark.parametrize('name', zoo_names())
def test_every_net_trains_resumes_and_exports(name, folder, tmp_path, capsys):
    small = 'channels: [32, 32, 32, 32]'
    if name.startswith(('sa_', 'resvit_')):
        small = 'embed_dim: 8, mlp_dim: 8' + (', depth: 2' if 'pruned' not in name else '')
    more = ['--batches', '2', '--shards', str(tmp_path / 'out'), *LIKE_TIMM, 'epochs=2', f'model_kwargs={{{small}}}']
    more.append(f'model={name}')
    checkpoint = run(folder, tmp_path / 'run', *more)
    assert checkpoint['epoch'] == 1 and checkpoint['arch'] == name
    shutil.rmtree(tmp_path / 'out')  # as after a kill between the last checkpoint and these
    assert run(folder, tmp_path / 'run', *more)['seconds'] == checkpoint['seconds']
    rows = list(csv.DictReader((tmp_path / 'out' / 'summary.csv').open()))
    assert list(rows[0]) == ['epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr'] and len(rows) == 2
    kwargs = yaml.safe_load(f'{{{small}}}')
    model = timm.create_model(name, **kwargs)
    hub.load_shards(model, tmp_path / 'out' / name)
    wanted = {k: v.half().float() if v.is_floating_point() else v for k, v in checkpoint['state_dict'].items()}
    torch.testing.assert_close(model.state_dict(), wanted)
    exported = capsys.readouterr().out.strip().splitlines()[-1]
    assert exported.startswith(f'timm-selfconv export {name} --checkpoint {tmp_path}/run/last.pth.tar ')
    assert f'--fact recipe={TINY} ' in exported and '--fact seed=42 ' in exported


def test_whole_epochs_are_told_as_such(folder, tmp_path, capsys):
    for batches in ([], ['--batches', '3']):  # all that there are
        run(folder, tmp_path / f'{len(batches)}', *batches, 'epochs=2', SMALL)
        exported = capsys.readouterr().out.strip().splitlines()[-1]
        assert '--fact epochs=2 ' in exported and 'images=' not in exported and '--batches' not in exported


def test_a_run_becomes_a_weight_file_by_the_command_that_it_prints(folder, tmp_path, capsys, monkeypatch):
    """With a net of its own size: export knows no other."""
    run(folder, tmp_path / 'run', '--batches', '1', '--shards', str(tmp_path / 'out'), 'epochs=1', 'model_ema=true')
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    cli(command[1:])
    shipped = hub.safetensors.torch.load_file(tmp_path / 'run/weights/sa_quadratic_tiny_cifar.safetensors')
    ema = torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)['state_dict_ema']
    torch.testing.assert_close(shipped, {k: v.half() for k, v in ema.items()})
    card = (tmp_path / 'run/weights/sa_quadratic_tiny_cifar.md').read_text()
    assert '| arguments | epochs=1 model_ema=true batch_size=8 --batches 1 |\n| epochs | 0.3 |\n' in card
    assert '| images | 8: 1 x 1 batches of 8 |\n' in card  # of 24
    assert '| teacher | none |\n' in card and '| initialised from | none |\n' in card
    assert f'| data | {folder.name}, split train |\n' in card and 'CIFAR' not in card
    history = (tmp_path / 'run' / 'history.json').read_bytes()
    assert (tmp_path / 'run/weights/sa_quadratic_tiny_cifar.history.json').read_bytes() == history
    command[command.index('--checkpoint') + 1] = str(tmp_path / 'out' / 'sa_quadratic_tiny_cifar')
    command[command.index('--output') + 1] = 'from_shards'
    cli(command[1:])
    again = hub.safetensors.torch.load_file(tmp_path / 'from_shards/sa_quadratic_tiny_cifar.safetensors')
    torch.testing.assert_close(again, shipped)
    assert (tmp_path / 'from_shards' / 'sa_quadratic_tiny_cifar.history.json').read_bytes() == history
    card = (tmp_path / 'from_shards' / 'sa_quadratic_tiny_cifar.md').read_text()
    assert '| epochs | 0.3 |' in card and '| weights | moving average, decay 0.9998 |' in card
