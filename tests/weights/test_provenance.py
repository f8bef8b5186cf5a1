"""Teacher and origin of weights, on cards and in captions."""
import pytest

from timm_selfconv import weights
from timm_selfconv.weights import saving


def test_a_net_inherits_the_teachers_of_its_origin(tmp_path, monkeypatch):
    def ship(name, teacher='none', origin='none'):
        """Write a card and a checksum, without weights."""
        saving.record_checksum(weights.weights_path(name), '0' * 64)
        facts = {'teacher': teacher, 'initialised from': origin}
        weights.card_path(name).write_text(saving.model_card(name, '', 0.8, 10000, facts))

    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)
    ship('net')
    ship('net.taught', 'resnet18_cifar (0.9474), from epoch 8 on')
    ship('rich.begun', origin='net.taught')
    ship('richer.begun', 'resnet_tiny_cifar', 'rich.begun, trained on')
    ship('net.pruned', origin='net')
    assert [weights.origin(name) for name in ('net', 'net.taught', 'rich.begun', 'richer.begun')] == [
        None, None, 'net.taught', 'rich.begun']
    assert weights.teachers('net') == []
    assert weights.teachers('net.taught') == weights.teachers('rich.begun') == ['resnet18_cifar']
    assert weights.teachers('richer.begun') == ['resnet18_cifar', 'resnet_tiny_cifar']
    assert weights.provenance('net') == weights.provenance('net.cifar10') == 'from scratch, labels only'
    assert weights.provenance('rich') == weights.provenance('resvit_cifar') == 'no weights'
    assert weights.provenance('net.taught') == 'from scratch, taught by resnet18_cifar'
    assert weights.provenance('richer.begun') == 'begun in rich.begun, taught by resnet18_cifar, resnet_tiny_cifar'
    assert weights.provenance('net.pruned') == 'begun in net, labels only'
    assert 'no evidence of learning' in weights.card_path('rich.begun').read_text()
    assert 'from `net`, which learned from labels' in weights.card_path('net.pruned').read_text()
    assert 'from labels alone' not in weights.card_path('net').read_text()


def test_tags_and_captions_name_teacher_and_origin():
    for name in weights.checksums():
        began, taught = weights.origin(name), weights.teachers(name)
        tag = name.partition('.')[2] or 'cifar10'
        assert tag == ('cifar10' if not taught else 'from_quadratic_cifar10' if began else 'dist_cifar10')
        assert {*taught, *([began] if began else [])} <= set(weights.checksums())
        assert weights.provenance(name) in weights.net_caption(weights.tagged_name(name))


def test_captions():
    accuracy = weights.measured_accuracy('sa_learned_tiny_cifar')
    learned = weights.net_caption('sa_learned_tiny_cifar')
    assert learned.endswith(f'test accuracy {100 * accuracy:.1f} %')
    assert weights.net_caption('resvit_cifar.cifar10') == 'its own weights'  # there are none
    assert weights.net_caption('sa_learned_tiny_cifar', 'folder/last.pth.tar') == 'weights of last.pth.tar'
    assert weights.net_caption('sa_learned_cifar', untrained=True) == 'untrained'
    assert weights.net_caption('hf-hub:me/pruned') == 'weights of pruned'


@pytest.mark.parametrize('rows, caption', [
    ({'heads': '9'}, 'weights of net'),  # a card of another project
    ({'initialised from': 'rich', 'teacher': 'unknown'}, 'begun in rich, teacher unknown'),
    ({'teacher': 'none', 'epochs': '2', 'validation accuracy': 'high'}, 'from scratch, labels only, 2 epochs'),
    ({'teacher': 'none', 'validation accuracy': '0.5000 (in eval mode)'},
     'from scratch, labels only, validation accuracy 50.0 %'),
])
def test_a_caption_repeats_only_the_card_of_a_folder(tmp_path, monkeypatch, rows, caption):
    folder = tmp_path / 'net'
    folder.mkdir()
    (folder / 'README.md').write_text(''.join(f'| {key} | {value} |\n' for key, value in rows.items()))
    monkeypatch.chdir(folder)
    for name in f'local-dir:{folder}', 'local-dir:.':
        assert weights.net_caption(name) == caption
