"""Fine-tuning on a folder of pictures; other commands load the result."""
import json
import re
from unittest import mock

import numpy as np
import pytest
import timm
from PIL import Image

from pictures import fill
from timm_selfconv.cli import main
from timm_selfconv.data import open_images, top_classes
from timm_selfconv.files import PICTURES
from timm_selfconv.training import trainer
from tiny_nets import SMALL

NET = 'sa_quadratic_tiny_cifar'
BRIEF = ['pretrained=false', SMALL, 'epochs=2']


@pytest.mark.slow
def test_digits_are_told_apart_by_a_net_for_other_commands(tmp_path, output_of):
    """The first 40 digits of three classes of scikit-learn, 8 x 8 pixels."""
    found, digits, net = pytest.importorskip('sklearn.datasets').load_digits(), tmp_path / 'digits', tmp_path / 'net'
    for label, name in zip((1, 3, 4), ('one', 'three', 'four')):
        (digits / name).mkdir(parents=True)
        for i, pixels in enumerate(found.images[found.target == label][:40]):
            Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(digits / name / f'{i}.png')
    output_of('finetune', NET, digits, '--output', net, 'hflip=0', 'img_size=16', 'batch_size=16')
    model = timm.create_model(f'local-dir:{net}', pretrained=True).eval()
    config, card = json.loads((net / 'config.json').read_text()), (net / 'README.md').read_text()
    assert config['label_names'] == ['four', 'one', 'three'] and config['num_classes'] == 3
    assert config['pretrained_cfg']['input_size'] == [3, 16, 16] and 'label_names' not in config['pretrained_cfg']
    pictures = sorted(digits.rglob('*.png'))
    best = top_classes(model, open_images(pictures), 1)
    right = [name == path.parent.name for path, ((name, _),) in zip(pictures, best)]
    assert np.mean(right) > 0.8
    accuracy = float(re.search(r'\| validation accuracy \| ([\d.]+) ', card)[1])
    assert accuracy > 0.8 and 24 * accuracy == pytest.approx(round(24 * accuracy), abs=0.01)
    assert f'| initialised from | {NET} |\n| teacher | none |' in card
    assert '| data | digits: 96 pictures to train on, 24 to validate on (20% of each class, ' in card
    assert '```text\nhflip=0 img_size=16 batch_size=16\n```' in card
    assert "create_model('local-dir:net', pretrained=True)" in card
    assert 'for pictures of 16 x 16 pixels and 3 classes: four, one, three.' in card
    assert 'three' in output_of('classify', f'local-dir:{net}', digits / 'three' / '0.png')
    assert 'on 120 images' in output_of('eval', f'local-dir:{net}', '--data', digits)


@pytest.fixture
def own(tmp_path):
    return fill(tmp_path / 'own', ['cat', 'dog'], count=7)


def test_a_killed_one_goes_on_and_a_whole_one_stays(own, tmp_path, monkeypatch, refused):
    def command(output):
        return ['finetune', NET, str(own), 'seed=3', '--output', str(tmp_path / output), *BRIEF]

    def finetune(output):
        main(command(output))
        return {path.name: path.read_bytes() for path in (tmp_path / output).glob('*.*') if path.suffix != '.tar'}

    whole = finetune('whole')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, 'save_history', mock.Mock(side_effect=KeyboardInterrupt))
        finetune('killed')
    assert not (tmp_path / 'killed' / 'config.json').exists()
    resumed = finetune('killed')
    assert resumed['model.safetensors'] == whole['model.safetensors'] and resumed['config.json'] == whole['config.json']
    assert finetune('killed') == resumed
    refused("another recipe (['lr'] differ)", [*command('killed'), 'lr=0.5'])


def test_teachers_pass_on(own, tmp_path, output_of):
    """A net keeps the teachers of the net that it starts from."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    output_of('finetune', NET, own, '--output', first, *BRIEF, 'epochs=1')
    card = (first / 'README.md').read_text()
    assert '| initialised from | none |\n| teacher | none |' in card
    (first / 'README.md').write_text(card.replace('teacher | none', 'teacher | resnet18_cifar (0.9474)'))
    output_of('finetune', f'local-dir:{first}', own, '--output', second, 'epochs=1')
    assert '| initialised from | first |\n| teacher | resnet18_cifar |' in (second / 'README.md').read_text()


def test_pictures_of_every_kind_are_trained_on_and_unreadable_ones_named(own, tmp_path, output_of, refused):
    command = ['finetune', NET, own, *BRIEF, '--output']
    for file, suffix in zip(sorted(own.rglob('*.png')), 2 * PICTURES):
        Image.open(file).convert('RGB').save(file.rename(file.with_suffix(suffix)))
    assert '12 pictures to train on, 2 to validate on' in output_of(*command, tmp_path / 'net')
    for file in own.rglob('*.*'):
        file.write_bytes(b'no picture')
    refused('needs a readable picture file', [*command, tmp_path / 'other'])
    assert not (tmp_path / 'other').exists()
