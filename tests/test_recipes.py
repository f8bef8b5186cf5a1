"""Recipes: their keys in timm's train.py, and the papers' hyper-parameters."""
import re
import runpy
from pathlib import Path

import pytest
import yaml

from timm_selfconv.measure.tables import shown, zoo_rows
from timm_selfconv.models import zoo_names
from timm_selfconv.training.recipes import read_recipe
from timm_selfconv.weights import card_facts

FOLDER = Path(__file__).resolve().parent.parent / 'recipes'
RECIPES = sorted(path.stem for path in FOLDER.glob('*.yaml'))
# by train.py, which takes any key; python -m timm_selfconv.train knows them
IGNORED = {'crop_padding', 'crop_padding_mode', 'hardest_half', 'img_sizes', 'position_lr_scale', 'stem_whitening'}


def load(recipe):
    return yaml.safe_load((FOLDER / f'{recipe}.yaml').read_text())


@pytest.mark.parametrize('recipe', RECIPES)
def test_recipes_fit_train_py(recipe, timm_scripts, as_a_script):
    """train.py does not check defaults from recipes, but it checks words of the command line with the same values."""
    train_py = runpy.run_path(f'{timm_scripts}/train.py')  # again, as its parser keeps the defaults of the last recipe
    parser, keys = train_py['parser'], {key: value for key, value in load(recipe).items() if key not in IGNORED}
    nargs = {action.dest: action.nargs for action in parser._actions}
    for key, value in keys.items():
        if nargs[key] in (0, '*'):  # a switch, or KEY=VALUE words
            assert type(value) is (bool if nargs[key] == 0 else dict), key
        else:
            words = map(str, value if isinstance(value, list) else [value])
            assert getattr(parser.parse_args([f"--{key.replace('_', '-')}", *words]), key) == value
    assert keys['device_modules'] == ['timm_selfconv']
    assert read_recipe(recipe).decay_epochs == parser.get_default('decay_epochs')  # timm's scheduler_kwargs has another


def test_the_chapter_has_the_recipes_of_each_model():
    chapter = (FOLDER / 'README.md').read_text()
    rows = {name: cells.split(' | ') for name, cells in re.findall(r'^\| `(\w+_cifar)` \| (.*) \|$', chapter, re.M)}
    assert list(rows) == zoo_names()
    for row in zoo_rows():
        published, ours = rows[row['name']]
        assert ours == shown(f"`{Path(card_facts(row['name'])['recipe']).stem}`" if row['accuracy'] else None)
        recipes = {recipe.strip('`') for recipe in (published, ours)} - {'-'}
        assert recipes and all(read_recipe(recipe, [f"model={row['name']}"]) for recipe in recipes)
    assert set(re.findall(r'^\| \[`(\w+)`\]', chapter, re.M)) == set(RECIPES)
    assert all((FOLDER / f'{name}.yaml').read_text().splitlines()[0][-1] == '.' for name in RECIPES)  # printed by list


COMMON = dict(
    epochs=300, batch_size=100, opt='sgd', lr=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=15, sched='cosine',
    hflip=0.5, smoothing=0.)
DROPOUT = dict(drop=0.1, model_kwargs=dict(attn_drop_rate=0.1))


@pytest.mark.parametrize('recipe,wanted', [
    ('paper', dict(opt='momentum', **DROPOUT)),
    ('pruned', dict(opt='momentum', epochs=100, lr=0.01, warmup_epochs=5, **DROPOUT)),
    ('report_sa', dict(model_kwargs=dict(attn_drop_rate=0.1), drop=None)),
    ('report_san', dict(
        batch_size=256, sched='multistep', decay_milestones=[100, 200, 250], warmup_epochs=0, smoothing=0.1)),
    ('report_san_hier', dict(warmup_epochs=10, smoothing=0.1, lr=0.01)),
    ('report_vit', dict(epochs=100, batch_size=32, lr=0.01, warmup_epochs=5)),
])
def test_published_hyper_parameters(recipe, wanted):
    wanted = {**COMMON, **wanted}
    assert {key: load(recipe).get(key) for key in wanted} == wanted
