"""Every line of recipes/README.md: what train.py makes of it, and what the papers say."""
import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.utils import ParseKwargs

from timm_selfconv import hub, weights
from timm_selfconv.measure.published import PAPER, PUBLISHED
from timm_selfconv.models import zoo_names
from timm_selfconv.training.recipes import read_recipe
from warm import WarmPython

FOLDER = Path(__file__).resolve().parent.parent / 'recipes'
README = (FOLDER / 'README.md').read_text()
RECIPES = sorted(path.stem for path in FOLDER.glob('*.yaml'))
CELLS = re.findall(r'^\| `(\w+)` \| (.*?) \| `(.*?)` \| `(.*?)` \| `(.*?)` \|$', README, re.MULTILINE)
LINES = {f"{net}-{re.search(r'recipes/(.*?).yaml', one)[1]}": cells for cells in CELLS for net, _, one, *_ in [cells]}
# by train.py, which takes any key; python -m timm_selfconv.train knows them
IGNORED = {'crop_padding', 'img_sizes', 'position_lr_scale', 'stem_whitening'}

each_line = pytest.mark.parametrize('line', LINES)

# arguments of timm's train.py that recipes give: what a value must be; in a list, several of them
ARGUMENTS = dict(
    device_modules=[str], model=str, model_kwargs=dict, dataset=str, input_key=str, target_key=str, train_split=str,
    val_split=str, epochs=int, batch_size=int, opt=str, lr=float, momentum=float, weight_decay=float, clip_grad=float,
    sched=str, sched_on_updates=bool, warmup_epochs=int, warmup_lr=float, decay_milestones=[int], decay_rate=float,
    pretrained=bool, amp=bool, amp_dtype=str, model_ema=bool, model_ema_decay=float, model_ema_warmup=bool,
    scale=[float], ratio=[float], hflip=float, color_jitter=float, aa=str, train_interpolation=str, reprob=float,
    mixup=float, cutmix=float, mixup_prob=float, smoothing=float, drop=float, drop_path=float, seed=int,
    val_interval=int, checkpoint_hist=int, initial_checkpoint=str)


def load(recipe):
    return yaml.safe_load((FOLDER / f'{recipe}.yaml').read_text())


def faults(recipe):
    """What train.py would not take: it sets a recipe's values as defaults, unchecked and as they are."""
    found = []
    for key in recipe.keys() - IGNORED:
        kind, values = ARGUMENTS.get(key), recipe[key]
        several = isinstance(kind, list)
        wanted = kind[0] if several else kind
        if kind is None or several != isinstance(values, list) or not all(
                type(v) is wanted or (wanted is float and type(v) is int) for v in (values if several else [values])):
            found.append(f'{key}={values!r}: needs {kind}')
    return found


def parser():
    """As timm's train.py makes it, of the arguments that recipes and their table give."""
    made = argparse.ArgumentParser(exit_on_error=False)
    for key, kind in ARGUMENTS.items():
        kwargs = {bool: dict(action='store_true'), dict: dict(nargs='*', action=ParseKwargs, default={})}.get(
            kind if not isinstance(kind, list) else None,
            dict(type=kind[0], nargs='+') if isinstance(kind, list) else dict(type=kind))
        made.add_argument(f"--{key.replace('_', '-')}", **kwargs)
    made.add_argument('--sync-bn', action='store_true')
    return made


def settings(arguments):
    """What train.py does, by the arguments behind its name."""
    flag, recipe, *more = shlex.split(arguments)
    assert flag == '-c'
    train_py = parser()
    train_py.set_defaults(**yaml.safe_load((FOLDER.parent / recipe).read_text()))
    return vars(train_py.parse_args(more))


def test_every_net_and_every_recipe_has_a_line():
    assert len(LINES) == len(CELLS) == README.count('| `-c recipes/')
    assert {net for net, *_ in CELLS} == set(zoo_names())
    assert {line.split('-')[1] for line in LINES} == set(RECIPES)


@pytest.mark.parametrize('recipe', RECIPES)
def test_recipes_fit_train_py(recipe):
    assert faults(load(recipe)) == []
    assert load(recipe)['device_modules'] == ['timm_selfconv']


@pytest.mark.parametrize('wrong', [
    dict(learning_rate=0.1), dict(lr='1e-4'), dict(device_modules='timm_selfconv'), dict(epochs=3.5),
    dict(amp=1), dict(epochs=True), dict(scale=0.5), dict(lr=[0.1]),
])
def test_what_train_py_would_take_wrongly_is_found(wrong):
    assert len(faults(wrong)) == 1


def test_train_py_itself_takes_every_line(timm_scripts, monkeypatch):
    spec = importlib.util.spec_from_file_location('train_py', Path(timm_scripts) / 'train.py')
    monkeypatch.chdir(FOLDER.parent)
    for _, _, one, eight, _ in CELLS:
        for arguments in (one, f'{one} {eight}'):
            train_py = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(train_py)  # anew: its parser keeps the defaults of the last recipe
            monkeypatch.setattr(sys, 'argv', ['train.py', *shlex.split(arguments)])
            taken = vars(train_py._parse_args()[0])
            ours = {key: value for key, value in settings(arguments).items() if value is not None}
            assert {key: taken[key] for key in ours} == ours
    actions = {action.dest: action for action in train_py.parser._actions}
    for key, kind in ARGUMENTS.items():
        several = isinstance(kind, list)
        assert (actions[key].nargs == '+') == several
        assert actions[key].type in ((None, str) if kind in (str, bool, dict) else kind if several else (kind,))


@each_line
def test_a_line_names_its_net_and_what_to_expect(line):
    net, expected, one, *_ = LINES[line]
    args = settings(one)
    assert args['model'] == net
    timm.create_model(net, device='meta', drop_rate=args['drop'] or 0., **args['model_kwargs'])
    rows = [row for row in PUBLISHED if row.name == net and not row.differs]
    if any(word in expected for word in ('paper', 'report')):
        for row in [row for row in rows if row.source == PAPER] or rows:
            assert f'{row.accuracy:.3f}' in expected
    else:
        assert 'measured' in expected
    shipped = weights.default_weights(net)
    if 'measured here' in expected:
        card = f'../timm_selfconv/weights/{weights.card_path(shipped).name}'
        assert f'**{weights.measured_accuracy(shipped):.4f}** [measured here]({card})' in expected
    every = ' '.join(cells[1] for cells in CELLS if cells[0] == net)
    assert ('measured here' in every) == weights.card_path(shipped).is_file()
    assert bool(rows) == ('paper' in every or 'report' in every)


@each_line
def test_eight_gpus_keep_the_learning_rate_an_image(line):
    _, _, one, eight, _ = LINES[line]
    alone, shared = settings(one), settings(f'{one} {eight}')
    assert shared['lr'] / (8 * shared['batch_size']) == pytest.approx(alone['lr'] / alone['batch_size'])
    assert alone['batch_size'] <= 8 * shared['batch_size'] <= 1.1 * alone['batch_size']


@each_line
def test_the_fastest_is_the_same_training(line, monkeypatch):
    """But for larger batches, whose learning rate an image stays, and when images grow, which is ours alone."""
    monkeypatch.chdir(FOLDER.parent)
    _, _, one, _, fastest = LINES[line]
    recipe, *overrides = shlex.split(fastest)
    fast, wanted = vars(read_recipe(recipe, overrides)), settings(one)
    assert fast['lr'] / fast['batch_size'] == pytest.approx(wanted['lr'] / wanted['batch_size'])
    if any(override.startswith('img_sizes=') for override in overrides):
        sizes = wanted.pop('img_sizes')
        assert list(fast['img_sizes'].values()) == list(sizes.values()) and max(fast['img_sizes']) < fast['epochs']
    for key in set(wanted) & set(fast) - {'lr', 'batch_size'}:
        assert wanted[key] is None or fast[key] == wanted[key]


def test_the_commands_above_the_table_are_of_its_cells():
    train_py, torchrun, fast = re.search(r'```bash\n(.*?)\n(.*?)\n(.*?)\n```', README).groups()
    _, _, one, eight, fastest = LINES['sa_learned_cifar-paper']
    assert train_py == f'python train.py {one}'
    assert torchrun == f'torchrun --nproc_per_node=8 train.py {one} {eight}'
    assert fast == f'python -m timm_selfconv.train {fastest} --output run'


@each_line
def test_published_hyper_parameters_are_the_default(line):
    net, _, one, *_ = LINES[line]
    recipe = line.split('-')[1]
    if recipe not in ('paper', 'pruned', 'report_sa', 'report_san', 'report_san_hier', 'report_vit'):
        pytest.skip('not a published training')
    wanted = dict(
        epochs=300, batch_size=100, lr=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=15, sched='cosine',
        decay_milestones=None, hflip=0.5, smoothing=0.0, model_kwargs={},
        opt='momentum' if recipe in ('paper', 'pruned') else 'sgd')
    wanted.update({
        'paper': dict(drop=0.1, model_kwargs=dict(attn_drop_rate=0.1)),
        'pruned': dict(epochs=100, lr=0.01, warmup_epochs=5, drop=0.1, model_kwargs=dict(attn_drop_rate=0.1)),
        'report_sa': dict(model_kwargs=dict(attn_drop_rate=0.1), drop=None),
        'report_san': dict(
            batch_size=256, sched='multistep', decay_milestones=[100, 200, 250], warmup_epochs=0, smoothing=0.1),
        'report_san_hier': dict(warmup_epochs=10, smoothing=0.1),
        'report_vit': dict(epochs=100, batch_size=32, lr=0.01, warmup_epochs=5),
    }[recipe])
    wanted.update({
        'resnet18_cifar': dict(drop=0., model_kwargs={}), 'san_patchwise_cifar': dict(lr=0.01),
        'san_patchwise_hier_cifar': dict(lr=0.01), 'san_pairwise_hier_cifar': dict(batch_size=40),
    }.get(net, {}))
    assert {key: settings(one)[key] for key in wanted} == wanted


def test_pruned_weights_start_the_training_of_the_pruned_net(tmp_path):
    """What --initial-checkpoint does; --pretrained-path would give the net a new classifier."""
    pruned = timm.create_model('sa_quadratic_gen_pruned_cifar', embed_dim=8)
    hub.save_weights(pruned, tmp_path / 'pruned.safetensors', torch.float32)
    model = timm.create_model(
        'sa_quadratic_gen_pruned_cifar', embed_dim=8, checkpoint_path=str(tmp_path / 'pruned.safetensors'))
    assert all(torch.equal(value, pruned.state_dict()[key]) for key, value in model.state_dict().items())


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


def command(scripts, recipe, images, output, *more):
    """Two batches of a recipe with timm's train.py on a CPU, as python's arguments."""
    return [
        os.path.join(scripts, 'train.py'), '-c', str(FOLDER / f'{recipe}.yaml'),
        *(f'--data-dir {images} --num-classes 4' if recipe == 'pictures' else f'--dataset hfds/{images}').split(),
        '--device', 'cpu', '--no-prefetcher', '--workers', '0', '--batch-size', '2', '--epochs', '1',
        '--warmup-epochs', '0', '--output', str(output), '--experiment', recipe, *more]


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    return dict(
        os.environ, OMP_NUM_THREADS='1', HF_DATASETS_CACHE=str(tmp_path_factory.mktemp('cache')),
        PYTHONPATH=os.pathsep.join([str(FOLDER.parent), str(FOLDER.parent / 'tests')]))


@pytest.fixture(scope='module')
def python(environment):
    """Without the zoo, which a recipe itself has to import."""
    with WarmPython(environment, 'timm', 'datasets') as python:
        yield python


def trained(done, output, recipe, batches):
    """The checkpoint of a run that saw so many batches a process."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert f'{batches - 1}/{batches} (' in done.stderr + done.stdout, done.stderr[-4000:]
    return torch.load(output / recipe / 'last.pth.tar', weights_only=False)


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    """A folder of four classes."""
    folder = tmp_path_factory.mktemp('pictures')
    for name in (f'{split}/{label}' for split in ('train', 'val') for label in range(4)):
        (folder / name).mkdir(parents=True)
        Image.new('RGB', (40, 50)).save(folder / name / '0.png')
    return folder


@pytest.mark.parametrize('recipe', RECIPES)
def test_recipes_train_for_two_batches(recipe, images, pictures, timm_scripts, python, tmp_path):
    done = python.run(*command(timm_scripts, recipe, pictures if recipe == 'pictures' else images, tmp_path))
    checkpoint = trained(done, tmp_path, recipe, batches=2)
    model = timm.create_model(load(recipe)['model'], num_classes=4 if recipe == 'pictures' else 10)
    assert model.load_state_dict(checkpoint['state_dict'])
    assert ('state_dict_ema' in checkpoint) == load(recipe).get('model_ema', False)


def test_two_processes_train_one_recipe(images, timm_scripts, environment, tmp_path):
    launcher = ['-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone']
    train = command(timm_scripts, 'muon_tiny', images, tmp_path, '--device-modules', 'timm_selfconv', 'ddp_on_cpu')
    done = subprocess.run([sys.executable, *launcher, *train], env=environment, capture_output=True, text=True)
    assert trained(done, tmp_path, 'muon_tiny', batches=1)['epoch'] == 0
