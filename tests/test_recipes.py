import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from timm_selfconv import hub
from timm_selfconv.measure.published import PAPER, PUBLISHED
from timm_selfconv.measure.tables import zoo_names

FOLDER = Path(__file__).resolve().parent.parent / 'recipes'
RECIPES = {path.stem: path for path in sorted(FOLDER.glob('*.yaml'))}
ARGUMENTS = json.loads((Path(__file__).parent / 'train_arguments.json').read_text())
SCRIPTS = os.environ.get('TIMM_SCRIPTS')
IGNORED = {'crop_padding'}  # by train.py, which takes any key; python -m timm_selfconv.train knows it
TYPES = {'str': (str,), 'int': (int,), 'float': (float, int), 'bool': (bool,), 'dict': (dict,)}

needs_scripts = pytest.mark.skipif(not SCRIPTS, reason="TIMM_SCRIPTS names no folder with timm's scripts")


def load(name):
    return yaml.safe_load(RECIPES[name].read_text())


def faults(recipe, arguments=ARGUMENTS):
    """What train.py would not take: it sets a recipe's values as defaults, unchecked and as they are."""
    found = []
    for key in recipe.keys() - IGNORED:
        argument, value = arguments.get(key), recipe[key]
        if argument is None:
            found.append(f'{key}: no argument of train.py')
            continue
        if argument['list'] != isinstance(value, list):
            found.append(f"{key}: needs {'a list' if argument['list'] else 'one value'}")
            continue
        for v in value if argument['list'] else [value]:
            if not isinstance(v, TYPES[argument['type']]) or isinstance(v, bool) != (argument['type'] == 'bool'):
                found.append(f"{key}={v!r}: needs {argument['type']}")
            elif argument['choices'] and v not in argument['choices']:
                found.append(f"{key}={v!r}: needs one of {argument['choices']}")
    return found


def test_every_net_has_a_recipe():
    assert set(zoo_names()) <= set(RECIPES)
    assert set(RECIPES) - set(zoo_names()) == {'sa_quadratic_cifar_modern'}


@pytest.mark.parametrize('name', RECIPES)
def test_recipes_fit_train_py(name):
    recipe = load(name)
    assert faults(recipe) == []
    assert recipe['device_modules'] == ['timm_selfconv']
    assert recipe['model'] == name.removesuffix('_modern')
    timm.create_model(recipe['model'], device='meta', **recipe.get('model_kwargs', {}))


@pytest.mark.parametrize('wrong', [
    dict(learning_rate=0.1), dict(lr='1e-4'), dict(device_modules='timm_selfconv'), dict(epochs=3.5),
    dict(amp=1), dict(epochs=True), dict(scale=0.5), dict(lr=[0.1]), dict(train_size_schedule='sudden'),
])
def test_what_train_py_would_take_wrongly_is_found(wrong):
    assert len(faults(wrong)) == 1


@pytest.mark.parametrize('name', RECIPES)
def test_headers_give_commands_and_what_to_expect(name):
    header = RECIPES[name].read_text().split('\n\n')[0]
    assert f'python train.py -c recipes/{name}.yaml' in header
    assert f'torchrun --nproc_per_node=8 train.py -c recipes/{name}.yaml --batch-size ' in header
    expected = header.split('# Expected:')[1]
    rows = [row for row in PUBLISHED if row.name == name and not row.differs]
    for row in [row for row in rows if row.source == PAPER] or rows:
        assert f'{row.accuracy:.3f}' in expected
    assert ('published' in expected) or ('measured' in expected)
    if hub.card_path(name).is_file():
        assert f'{hub.measured_accuracy(name):.4f} test accuracy, measured here' in expected
    assert all(len(line) <= 120 for line in header.splitlines())


@pytest.mark.parametrize('name', RECIPES)
def test_eight_gpus_keep_the_learning_rate_an_image(name):
    recipe = load(name)
    found = re.search(r'--nproc_per_node=8 .*--batch-size (\d+)(?: --lr (\S+))?', RECIPES[name].read_text())
    images, lr = 8 * int(found[1]), float(found[2] or recipe['lr'])
    assert lr / images == pytest.approx(recipe['lr'] / recipe['batch_size'])


def test_pruned_weights_start_the_training_of_the_pruned_net(tmp_path):
    """What --initial-checkpoint does; --pretrained-path would give the net a new classifier."""
    assert '--initial-checkpoint pruned/model.safetensors' in RECIPES['sa_quadratic_gen_pruned_cifar'].read_text()
    pruned = timm.create_model('sa_quadratic_gen_pruned_cifar', embed_dim=8)
    save_file(pruned.state_dict(), tmp_path / 'pruned.safetensors')
    model = timm.create_model(
        'sa_quadratic_gen_pruned_cifar', embed_dim=8, checkpoint_path=str(tmp_path / 'pruned.safetensors'))
    assert all(torch.equal(value, pruned.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('name', [n for n in RECIPES if 'hier' in n and n.startswith('sa_') and 'tiny' not in n])
def test_the_report_s_hyper_parameters_are_the_default(name):
    recipe = load(name)
    report = dict(
        epochs=300, batch_size=100, opt='sgd', lr=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=15,
        sched='cosine', hflip=0.5, smoothing=0.0, model_kwargs=dict(attn_drop_rate=0.1), drop=None)
    assert {key: recipe.get(key) for key in report} == report


@pytest.mark.parametrize('name,differs', [
    ('san_pairwise_cifar', dict(batch_size=256, sched='multistep', warmup_epochs=0)),
    ('san_patchwise_cifar', dict(batch_size=256, sched='multistep', warmup_epochs=0, lr=0.01)),
    ('san_pairwise_hier_cifar', dict(batch_size=40)),
    ('san_patchwise_hier_cifar', dict(lr=0.01)),
    *((name, dict(epochs=100, batch_size=32, lr=0.01, warmup_epochs=5, smoothing=0.0))
      for name in ('resvit_cifar', 'resvit_hier_cifar')),
])
def test_the_report_s_hyper_parameters_of_other_hosts(name, differs):
    recipe = load(name)
    report = dict(dict(
        epochs=300, batch_size=100, opt='sgd', lr=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=10,
        sched='cosine', hflip=0.5, smoothing=0.1), **differs)
    assert {key: recipe.get(key) for key in report} == report
    assert recipe.get('decay_milestones') == ([100, 200, 250] if report['sched'] == 'multistep' else None)


@pytest.mark.parametrize('name', [
    n for n in RECIPES if n.endswith('cifar') and not re.search('tiny|hier|^san_|^resvit_', n)])
def test_the_paper_s_hyper_parameters_are_the_default(name):
    recipe = load(name)
    paper = dict(
        epochs=300, batch_size=100, opt='momentum', lr=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=15,
        sched='cosine', hflip=0.5, smoothing=0.0)
    if name == 'sa_quadratic_gen_pruned_cifar':
        paper.update(epochs=100, lr=0.01, warmup_epochs=5)
    if name != 'resnet18_cifar':
        paper.update(drop=0.1, model_kwargs=dict(attn_drop_rate=0.1))
    assert {key: recipe.get(key) for key in paper} == paper
    assert recipe['warmup_epochs'] == 0.05 * recipe['epochs']


def test_arguments_are_read_off_a_script():
    spec = importlib.util.spec_from_file_location('train_arguments', Path(__file__).parent / 'train_arguments.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script = """
group.add_argument('-b', '--batch-size', type=int, default=4, help='x')
parser.add_argument('--amp', action='store_true')
parser.add_argument('--betas', nargs='+', type=float)
parser.add_argument('--size', nargs=3, type=int)
parser.add_argument('--compile', nargs='?', const='inductor')
parser.add_argument('--kind', choices=('a', 'b'))
parser.add_argument('--kwargs', nargs='*', action=utils.ParseKwargs)
"""
    assert module.train_arguments(script) == {
        'amp': dict(type='bool', list=False, choices=None),
        'batch_size': dict(type='int', list=False, choices=None),
        'betas': dict(type='float', list=True, choices=None),
        'compile': dict(type='str', list=False, choices=None),
        'kind': dict(type='str', list=False, choices=('a', 'b')),
        'kwargs': dict(type='dict', list=False, choices=None),
        'size': dict(type='int', list=True, choices=None),
    }
    with pytest.raises(ValueError, match='source'):
        module.train_arguments('print(1)')
    if SCRIPTS:
        current = module.train_arguments((Path(SCRIPTS) / 'train.py').read_text())
        assert [fault for name in RECIPES for fault in faults(load(name), current)] == []


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Four pictures a split, two batches, laid out as CIFAR-10 on the Hub."""
    datasets = pytest.importorskip('datasets')
    folder = tmp_path_factory.mktemp('images')
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(num_classes=10))
    pictures = [Image.new('RGB', (32, 32), (25 * label, 99, 60)) for label in range(4)]
    for split in ('train', 'test'):
        split_set = datasets.Dataset.from_dict(dict(img=pictures, label=list(range(4))), features=features)
        split_set.to_parquet(folder / f'{split}-00000-of-00001.parquet')
    return folder


def train(name, images, output, launcher=(), more=(), batches=2):
    """Two batches of a recipe with timm's train.py on a CPU, shared by the processes; returns the checkpoint."""
    command = [
        sys.executable, *launcher, os.path.join(SCRIPTS, 'train.py'), '-c', str(RECIPES[name]),
        '--dataset', f'hfds/{images}', '--device', 'cpu', '--no-prefetcher', '--workers', '0',
        '--batch-size', '2', '--epochs', '1', '--warmup-epochs', '0', '--output', str(output), '--experiment',
        name, *more]
    environment = dict(
        os.environ, OMP_NUM_THREADS='1', HF_DATASETS_CACHE=str(output / 'cache'),
        PYTHONPATH=str(FOLDER.parent / 'tests'))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f'{batches - 1}/{batches} (' in done.stderr + done.stdout, done.stderr[-4000:]
    return torch.load(output / name / 'last.pth.tar', weights_only=False)


@needs_scripts
@pytest.mark.parametrize('name', RECIPES)
def test_recipes_train_for_two_batches(name, images, tmp_path):
    checkpoint = train(name, images, tmp_path)
    model = timm.create_model(load(name)['model'])
    assert model.load_state_dict(checkpoint['state_dict'])
    assert ('state_dict_ema' in checkpoint) == load(name).get('model_ema', False)


@needs_scripts
def test_two_processes_train_one_recipe(images, tmp_path):
    launcher = ('-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone')
    more = ('--device-modules', 'timm_selfconv', 'ddp_on_cpu')
    assert train('sa_quadratic_tiny_cifar', images, tmp_path, launcher, more, batches=1)['epoch'] == 0
