"""Recipes as our trainer reads them: what it does not do is refused."""
import pytest

from timm_selfconv.training.recipes import RECIPES, read_recipe


@pytest.mark.parametrize('overrides,message', [
    (['aa=rand-m9'], r"does not do \['aa'\]; aa=null"),
    (['lr'], r"override='lr': needs KEY=VALUE"),
    (['color_jitter=0.4'], r'color_jitter=0.4: timm_selfconv.train needs 0'),
    (['amp_dtype=float16'], r"amp_dtype='float16': timm_selfconv.train needs 'bfloat16'"),
    (['train_interpolation=random'], r"train_interpolation='random': needs 'bilinear' or 'bicubic'"),
    (['kd_distill_type=token'], r"kd_distill_type='token': needs 'logit'"),
    (['lr=null'], r'lr=None: needs a value'),
    (['lr=fast'], r"lr='fast': needs a number above 0"),
    (['lr=.nan'], r'lr=nan: needs'),
    (['epochs=0'], r'epochs=0: needs a whole number above 0'),
    (['batch_size=12.5'], r'batch_size=12.5: needs a whole number'),
    (['amp=1'], r'amp=1: needs true or false'),
    (['img_sizes={0: big}'], r"img_sizes={0: 'big'}: needs a size in pixels by the epoch"),
    (['kd_maps={1: layer3}'], r"kd_maps={1: 'layer3'}: needs a teacher's stage by the layer that learns it"),
    (['kd_maps={-1: 3}'], r'kd_maps={-1: 3}: needs .* from 0'),
    (['clip_grad=-1'], r'clip_grad=-1.0: needs a number above 0'),
    (['scale=[2,1]'], r'scale=\[2, 1\]: needs 2 rising numbers above 0 and at most 1'),
    (['scale=[1]'], r'scale=\[1\]: needs 2 rising numbers'),
    (['ratio=[0,1]'], r'ratio=\[0, 1\]: needs 2 rising numbers above 0'),
    (['smoothing=2'], r'smoothing=2.0: needs a number of at least 0 and at most 1'),
    (['mixup=-1'], r'mixup=-1.0: needs'), (['crop_padding=-1'], r'crop_padding=-1: needs a whole number of at'),
    (['crop_padding_mode=edge'], r"crop_padding_mode='edge': needs 'constant' or 'reflect'"),
    (['hardest_half={0: 0}'], r'hardest_half={0: 0}: needs a size in pixels by the epoch'),
    (['sched=plateau'], r"sched='plateau': needs 'cosine' or"),
    (['ratio=[1, 1'], r"override='ratio=\[1, 1': needs YAML"),
    (['epochs=1' + 400 * '0'], r'epochs=10+\.\.\.0+: needs a whole number above 0 and at most 1000000'),
    (['epochs=1' + 9000 * '0'], r'override=.*: needs YAML'),
    (['lr=1' + 400 * '0'], r'lr=10+\.\.\.0+: needs a number above 0 and at most'), (['lr=1e26'], r'lr=1e\+26: needs'),
    (['seed=100000000000000000000000000'], r'seed=1.*: needs a whole number of at least 0 and at most 2147483647'),
    (['seed=-1'], r'seed=-1: needs'), (['momentum=1' + 400 * '0'], r'momentum=1.*: needs'),
    (['ratio=[1, 1' + 400 * '0' + ']'], r'ratio=.*: needs 2 rising'), (['scale=[.nan, 1]'], 'scale=.*: needs 2 rising'),
    (['img_sizes={0: 1' + 400 * '0' + '}'], r'img_sizes=.*: needs'), (['decay_milestones=[a]'], 'needs whole numbers'),
    (['modle=paper'], r"does not do \['modle'\]; did you mean model\? modle=null leaves it out"),
])
def test_what_it_does_not_do_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        read_recipe('muon_tiny', overrides)
    assert '\n' not in str(error.value) and len(str(error.value)) < 250


def test_numbers_that_yaml_takes_for_words_are_numbers():
    assert read_recipe('muon_tiny', ['lr=1e-3', 'weight_decay=5E-2']).lr == 0.001


@pytest.mark.parametrize('text,message', [('a: [1', 'needs YAML'), ('- a', 'needs a line KEY'), ('', 'a line KEY')])
def test_broken_recipes_are_refused(tmp_path, text, message):
    (tmp_path / 'recipe.yaml').write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(str(tmp_path / 'recipe.yaml'))


def test_recipes_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_recipe('muon_tiny') == read_recipe(str(RECIPES / 'muon_tiny.yaml'))
    with pytest.raises(ValueError, match=r"recipe='nowhere.yaml': there is none; the package has .*tiny"):
        read_recipe('nowhere.yaml')
