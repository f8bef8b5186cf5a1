"""Reading of recipes by our trainer."""
import pytest

from timm_selfconv.training.recipes import RECIPES, read_recipe


@pytest.mark.parametrize('overrides,message', [
    (['modle=paper'], r"does not support \['modle'\]; did you mean model\? modle=null leaves it out"),
    (['lr'], r"override='lr': needs KEY=VALUE"),
    (['color_jitter=0.4'], r'color_jitter=0.4: the trainer needs 0'),
    (['amp_dtype=float16'], r"amp_dtype='float16': the trainer needs 'bfloat16'"),
    (['crop_padding_mode=edge'], r"crop_padding_mode='edge': needs 'constant' or 'reflect'"),
    (['lr=null'], r'lr=None: needs a value'),
    (['lr=.nan'], r'lr=nan: needs'),
    (['lr=1' + 400 * '0'], r'lr=10+\.\.\.0+: needs a number above 0 and at most'),
    (['epochs=0'], r'epochs=0: needs a whole number above 0'),
    (['epochs=1' + 9000 * '0'], r'override=.*: needs YAML'),
    (['amp=1'], r'amp=1: needs true or false'),
    (['img_sizes={0: big}'], r"img_sizes={0: 'big'}: needs FIRST_EPOCH: PIXELS"),
    (['img_sizes={-1: 16}'], r'img_sizes={-1: 16}: needs FIRST_EPOCH: PIXELS'),
    (['crop_padding=null'], r'crop_padding=None: needs a value'),
    (['smoothing=2'], r'smoothing=2.0: needs a number of at least 0 and at most 1'),
    (['seed=-1'], r'seed=-1: needs a whole number of at least 0 and at most 2147483647'),
    (['decay_milestones=[a]'], 'needs whole numbers'),
])
def test_unsupported_keys_and_values_raise(overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        read_recipe('muon_tiny', overrides)
    assert '\n' not in str(error.value) and len(str(error.value)) < 250


def test_numbers_that_yaml_takes_for_words_are_numbers():
    assert read_recipe('muon_tiny', ['lr=1e-3', 'weight_decay=5E-2']).lr == 0.001


def test_recipes_have_names_and_lines(tmp_path, monkeypatch):
    for text, message in (('a: [1', 'needs YAML'), ('', 'needs a line KEY')):
        (tmp_path / 'recipe.yaml').write_text(text)
        with pytest.raises(ValueError, match=message):
            read_recipe(str(tmp_path / 'recipe.yaml'))
    monkeypatch.chdir(tmp_path)
    assert read_recipe('muon_tiny') == read_recipe(str(RECIPES / 'muon_tiny.yaml'))
    with pytest.raises(ValueError, match=r"recipe='nowhere.yaml': no such recipe; this package has .*tiny"):
        read_recipe('nowhere.yaml')
