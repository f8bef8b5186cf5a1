import re

import pytest
import safetensors.torch
import torch
import torch.nn as nn
from huggingface_hub import ModelCard
from PIL import Image

from timm_selfconv import files, weights
from timm_selfconv.measure.tables import zoo_counts
from timm_selfconv.weights import WEIGHTS_DIR, publishing, saving


def test_weights_are_saved_whole_and_never_over_others(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    path = tmp_path / 'new' / 'net.safetensors'
    saving.save_weights(model, path)
    saved = safetensors.torch.load_file(path)
    assert saved['0.weight'].dtype == torch.float16 and saved['1.num_batches_tracked'].dtype == torch.int64
    torch.testing.assert_close(saved['0.weight'].float(), model[0].weight, rtol=1e-3, atol=1e-4)
    with pytest.raises(FileExistsError, match=r'net.safetensors exists'):
        saving.save_weights(nn.Linear(3, 2), path)


def test_weights_that_do_not_fit_the_type_or_name_are_refused(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"path='.*net.pth'.*safetensors"):
        saving.save_weights(model, tmp_path / 'net.pth')
    nn.init.constant_(model.weight, 1e6)
    with pytest.raises(ValueError, match=r'float16.*weight.*not finite'):
        saving.save_weights(model, tmp_path / 'net.safetensors')
    assert list(tmp_path.iterdir()) == []


def test_cards_say_what_they_are_told_and_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)
    assert weights.measured_accuracy('net') is None and weights.card_facts('net') == {}
    facts = dict(recipe='recipes/net.yaml', seed='42', time='36 minutes, beside other work')
    files.write_new(weights.card_path('net'), saving.model_card('net', 0.8123, 10000, facts).encode())
    assert weights.measured_accuracy('net') == 0.8123
    card = ModelCard.load(weights.card_path('net'))
    assert card.data.license == 'apache-2.0' and card.data.library_name == 'timm'
    assert [result.metric_value for result in card.data.eval_results] == [0.8123]  # which the Hub shows
    assert '| seed | 42 |' in card.text and 'import timm_selfconv' in card.text
    assert "create_model('net.cifar10', " in card.text and 'explore net.cifar10 ' in card.text  # not other weights
    read = weights.card_facts('net')
    assert read.pop('test accuracy').startswith('0.8123 (10,000 images') and read == facts


@pytest.mark.parametrize('path', sorted(WEIGHTS_DIR.glob('*.safetensors')), ids=lambda p: p.stem)
def test_everything_that_ships_has_a_card(path):
    facts, accuracy = weights.card_facts(path.stem), weights.measured_accuracy(path.stem)
    assert {'recipe', 'epochs', 'seed', 'hardware', 'teacher', 'initialised from', 'test accuracy'} <= facts.keys()
    assert facts.pop('test accuracy')
    assert weights.card_path(path.stem).read_text() == saving.model_card(path.stem, accuracy, 10000, facts)
    counts = zoo_counts()[path.stem.partition('.')[0]]
    assert facts['parameters'] == f"{counts['parameters']:,}" and facts['multiply-adds'] == f"{counts['flops'] // 2:,}"
    assert 0.5 < accuracy < 1
    assert files.sha256(path) == weights.checksums()[path.stem] == weights.card_facts(path.stem)['SHA-256']


@pytest.mark.parametrize('name', ['resnet_tiny_cifar', 'sa_quadratic_tiny_cifar', 'san_patchwise_hier_cifar'])
def test_what_a_card_says_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (50, 40), 'white').save('cat.jpg')
    scope = {}
    for block in re.findall(r'^```python\n(.*?)^```$', weights.card_path(name).read_text(), re.MULTILINE | re.DOTALL):
        exec(block, scope)
    assert scope['probabilities'].shape == (10,) and len(scope['features']) > 1


def test_what_is_no_net_is_not_published(tmp_path):
    (tmp_path / 'config.json').touch()
    for folder in (tmp_path, tmp_path / 'nowhere'):
        with pytest.raises(ValueError, match=rf"folder='{folder}': needs config.json and model.safetensors"):
            publishing.publish(folder, 'nobody/nothing')


def test_a_weight_file_has_one_checksum_of_those_in_order(tmp_path):
    for name, digit in (('b', '0'), ('c', '1'), ('b', '2'), ('a', '3')):
        saving.record_checksum(tmp_path / f'{name}.safetensors', 64 * digit)
    assert (tmp_path / 'SHA256SUMS').read_text() == ''.join(
        f'{64 * digit}  {name}.safetensors\n' for name, digit in (('a', '3'), ('b', '2'), ('c', '1')))
