"""The fast training script, against torch's, timm's and PIL's own."""
import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import timm.loss
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from timm.data import create_transform

from timm_selfconv import hub, train
from timm_selfconv.measure.tables import zoo_names
from timm_selfconv.cli import main as cli

RECIPES = Path(__file__).resolve().parent.parent / 'recipes'
TINY = str(RECIPES / 'tiny.yaml')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Noise in the layout of timm's image folders, two classes: 24 images to train on and 6 to test."""
    folder, rng = tmp_path_factory.mktemp('noise'), np.random.default_rng(0)
    for split, n in (('train', 12), ('test', 3)):
        for label in 'ab':
            (folder / split / label).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f'{i}.png')
    return folder


SMALL = 'model_kwargs={embed_dim: 8, mlp_dim: 8, depth: 2}'


def run(folder, output, *more):
    train.main([TINY, '--data', str(folder), '--output', str(output), *more, 'batch_size=8'])
    return torch.load(output / 'last.pth.tar', weights_only=True)


@pytest.mark.parametrize('overrides,message', [
    (['aa=rand-m9'], r"does not do \['aa'\]; aa=null"),
    (['lr'], r"override='lr': needs KEY=VALUE"),
    (['color_jitter=0.4'], r'color_jitter=0.4: timm_selfconv.train needs 0'),
    (['amp_dtype=float16'], r"amp_dtype='float16': timm_selfconv.train needs bfloat16"),
    (['train_interpolation=random'], r"train_interpolation='random': needs 'bilinear' or 'bicubic'"),
    (['lr=null'], r'lr=None: needs a learning rate'),
])
def test_what_it_does_not_do_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        train.read_recipe(TINY, overrides)


@pytest.mark.parametrize('more,message', [
    (['batch_size=100'], r'batch_size=100: needs at most the 24 training images'),
    (['batch_size=8', 'model_kwargs={num_classes: 1}'], r'largest label 1: .* has 1 classes'),
    (['batch_size=8', 'train_split=nowhere'], r'nowhere'),
])
def test_data_that_does_not_fit_is_refused(folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit):
        train.main([TINY, '--data', str(folder), '--output', str(tmp_path), *more])
    assert re.search(message, capsys.readouterr().err) and list(tmp_path.iterdir()) == []


def test_padded_crops_are_all_the_windows_of_the_padded_image():
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    crops = train.padded_crop(image.expand(600, -1, -1, -1), 2)
    padded = F.pad(image[0], (2, 2, 2, 2))
    windows = {padded[:, i:i + 5, j:j + 6].numpy().tobytes() for i in range(5) for j in range(5)}
    assert {crop.numpy().tobytes() for crop in crops} == windows  # of 600 draws each of 25 is missed with odds 1e-9


@pytest.mark.parametrize('interpolation,kind,tolerance', [
    ('bilinear', Image.Resampling.BILINEAR, 1.01), ('bicubic', Image.Resampling.BICUBIC, 16)])
def test_resized_crops_are_pil_s(monkeypatch, interpolation, kind, tolerance):
    """The interior: at its border PIL sees the window alone, grid_sample what lies around it (and cubics differ)."""
    smooth = np.add.outer(np.linspace(0, 120, 32), np.linspace(0, 120, 32))[..., None] * np.array([1, .5, .9])
    picture = (smooth + 8 * np.sin(np.arange(32))[:, None, None]).astype(np.uint8)
    size, corner = torch.tensor([[0.3, 0.6], [0.2, 0.7]]), torch.tensor([[0.1, 0.8], [0.5, 0.99]])
    drawn = {3: torch.cat([torch.ones(2, 1, 2), size[:, None].expand(-1, 9, -1)], 1), 2: corner}  # the first won't fit
    monkeypatch.setattr(train.torch, 'rand', lambda *shape, **kwargs: drawn[len(shape)])
    x = torch.from_numpy(picture).permute(2, 0, 1).float().expand(2, -1, -1, -1)
    ours = train.random_resized_crop(x, (0.5, 1.), (0.8, 1.25), interpolation)
    for image, (u_area, u_aspect, u_top, u_left) in zip(ours, torch.cat([size, corner]).T.tolist()):
        area, aspect = 1024 * (0.5 + 0.5 * u_area), 0.8 * (1.25 / 0.8) ** u_aspect
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        assert w <= 32 and h <= 32
        top, left = int(u_top * (33 - h)), int(u_left * (33 - w))
        wanted = Image.fromarray(picture).crop((left, top, left + w, top + h)).resize((32, 32), kind)
        difference = image.permute(1, 2, 0).numpy() - np.asarray(wanted, dtype=float)
        assert np.abs(difference[2:-2, 2:-2]).max() < tolerance


def test_windows_are_drawn_as_timm_draws_them():
    """A map of its own coordinates tells each window: mean and spread of its sides and corner, against timm's."""
    torch.manual_seed(0)
    rows = torch.arange(32.).view(1, 1, 32, 1).expand(4000, 1, 32, 32)
    crops = train.random_resized_crop(rows, (0.3, 1.), (0.75, 4 / 3), 'bilinear')[:, 0, :, 16]
    height = (crops[:, 20] - crops[:, 10]) / 10 * 32
    top = crops[:, 16] - height * (16.5 / 32) + 0.5
    transform = timm.data.transforms.RandomResizedCropAndInterpolation
    timms = [transform.get_params(Image.new('L', (32, 32)), (0.3, 1.), (0.75, 4 / 3)) for _ in range(4000)]
    wanted_top, _, wanted_height, _ = torch.tensor(timms).double().T
    for ours, wanted in ((height, wanted_height), (top, wanted_top)):
        assert float(ours.mean()) == pytest.approx(float(wanted.mean()), abs=0.3)
        assert float(ours.std()) == pytest.approx(float(wanted.std()), abs=0.3)


def test_images_are_normalised_as_timm_does(folder):
    args = train.read_recipe(TINY, ['hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]'])
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8)
    augment = train.Augment(args, model, torch.device('cpu'))
    images, labels = train.load_images(str(folder), 'test', 'img', 'label', torch.device('cpu'))
    assert images.dtype == torch.uint8 and labels.tolist() == [0, 0, 0, 1, 1, 1]
    transform = create_transform(**timm.data.resolve_data_config({}, model=model))
    wanted = torch.stack([transform(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images])
    torch.testing.assert_close(augment.normalize(images), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(augment(images), wanted, rtol=0, atol=1e-5)


def test_one_step_is_that_of_torch_s_optimiser(folder):
    """Augmentation off, one batch of all images: its order does not matter."""
    args = train.read_recipe(TINY, [
        'hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]', 'amp=null', 'opt=momentum', 'lr=0.5', 'sched_on_updates=true',
        'warmup_epochs=0', 'batch_size=24', 'epochs=2', 'clip_grad=0.1', SMALL])
    data = train.load_images(str(folder), 'train', 'img', 'label', torch.device('cpu'))
    training = train.Training(args, data)
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

    scheduler, _ = train.create_scheduler_v2(
        training.optimizer, **train.scheduler_kwargs(args), updates_per_epoch=training.steps)
    assert training.epoch(scheduler) == pytest.approx(loss.item(), rel=1e-5)
    assert training.optimizer.param_groups[0]['lr'] == pytest.approx(0.25)  # half of the cosine
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)


def test_killed_and_resumed_it_ends_with_the_same_weights(folder, tmp_path):
    more = ['--device', 'cpu', 'epochs=400', 'drop=0.1', 'model_ema=true', 'mixup=0.2', 'cutmix=1', 'reprob=0.5', SMALL]
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

    class Enough(Exception):
        pass

    def stop_after(epoch):  # the schedule knows the number of epochs, so the rest of both runs is cut short
        save = torch.save

        def saved(checkpoint, path):
            save(checkpoint, path)
            if checkpoint['epoch'] > epoch:
                raise Enough
        return saved

    for output in ('killed', 'whole'):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
            patch.setattr(train.torch, 'save', stop_after(done + 1))
            run(folder, tmp_path / output, *more)
    killed, whole = (torch.load(tmp_path / o / '.last.pth.tar', weights_only=True) for o in ('killed', 'whole'))
    assert killed['epoch'] == whole['epoch'] == done + 2
    for key in ('state_dict', 'state_dict_ema', 'history'):
        torch.testing.assert_close(killed[key], whole[key], rtol=0, atol=0)
    before = torch.load(tmp_path / 'whole' / 'last.pth.tar', weights_only=True)
    assert before['epoch'] == done + 1  # the file that counts is not the one that was being written


def test_another_recipe_does_not_go_on_with_a_run(folder, tmp_path, capsys):
    run(folder, tmp_path, '--batches', '1', 'epochs=1', SMALL)
    before = (tmp_path / 'last.pth.tar').read_bytes()
    with pytest.raises(SystemExit):
        run(folder, tmp_path, '--batches', '1', 'epochs=1', 'lr=0.5', SMALL)
    assert re.search(r"run of another recipe \(\['lr'\] differ\)", capsys.readouterr().err)
    assert (tmp_path / 'last.pth.tar').read_bytes() == before


def test_what_is_validated_how_often(folder, tmp_path):
    run(folder, tmp_path, '--batches', '1', 'epochs=5', 'val_interval=2', SMALL)
    rows = list(csv.DictReader((tmp_path / 'summary.csv').open()))
    assert [bool(row['eval_top1']) for row in rows] == [False, True, False, True, True]
    assert all(row['train_loss'] and row['lr'] for row in rows)


@pytest.mark.parametrize('name', zoo_names())
def test_every_net_trains_resumes_and_exports(name, folder, tmp_path, capsys):
    small = ('embed_dim: 8, mlp_dim: 8, num_classes: 10' if name.startswith(('sa_', 'resvit_'))
             else 'channels: [32, 32, 32, 32]')
    more = ['--batches', '2', '--shards', str(tmp_path / 'out'), 'epochs=2', f'model_kwargs={{{small}}}']
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


def test_a_run_becomes_a_weight_file_by_the_command_that_it_prints(folder, tmp_path, capsys, monkeypatch):
    """With a net of its own size: export knows no other."""
    run(folder, tmp_path / 'run', '--batches', '1', '--shards', str(tmp_path / 'out'), 'epochs=1', 'model_ema=true')
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    cli(command[1:])
    shipped = hub.safetensors.torch.load_file(tmp_path / 'timm_selfconv/weights/sa_quadratic_tiny_cifar.safetensors')
    ema = torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)['state_dict_ema']
    torch.testing.assert_close(shipped, {k: v.half() for k, v in ema.items()})
    command[command.index('--checkpoint') + 1] = str(tmp_path / 'out' / 'sa_quadratic_tiny_cifar')
    command[command.index('--output') + 1] = 'from_shards'
    cli(command[1:])
    again = hub.safetensors.torch.load_file(tmp_path / 'from_shards/sa_quadratic_tiny_cifar.safetensors')
    torch.testing.assert_close(again, shipped)
    card = (tmp_path / 'from_shards' / 'sa_quadratic_tiny_cifar.md').read_text()
    assert '| epochs | 1 |' in card and '| weights | moving average, decay 0.9998 |' in card
    assert '| precision | trained under bfloat16 autocast, stored as float16 |' in card
