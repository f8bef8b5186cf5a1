"""Teacher and origin of shipped weights, on cards, in captions and in tables."""
import pytest

from timm_selfconv import weights
from timm_selfconv.measure.tables import format_results, results_rows
from timm_selfconv.weights import saving


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Ships weights without a file: a card and a checksum, in a folder of the test's own."""
    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)

    def write(name, accuracy, **facts):
        saving.record_checksum(weights.weights_path(name), '0' * 64)
        weights.card_path(name).write_text(saving.model_card(
            name, accuracy, 10000, {key.replace('_', ' '): fact for key, fact in facts.items()}))

    return write


def test_a_net_passes_its_teacher_on_to_those_begun_in_it(ship):
    ship('net', 0.7, teacher='none', initialised_from='none')
    ship('net.taught', 0.8, teacher='resnet18_cifar (0.9474), from epoch 8 on', initialised_from='none')
    ship('rich.begun', 0.8, teacher='none', initialised_from='net.taught')
    ship('richer.begun', 0.8, teacher='resnet_tiny_cifar', initialised_from='rich.begun, trained on')
    assert [weights.origin(name) for name in ('net', 'net.taught', 'rich.begun', 'richer.begun')] == [
        None, None, 'net.taught', 'rich.begun']
    assert weights.teachers('net') == []
    assert weights.teachers('net.taught') == weights.teachers('rich.begun') == ['resnet18_cifar']
    assert weights.teachers('richer.begun') == ['resnet18_cifar', 'resnet_tiny_cifar']
    assert weights.provenance('net') == weights.provenance('net.cifar10') == 'from scratch, labels only'
    assert weights.provenance('rich') == weights.provenance('resvit_cifar') == 'no weights'
    assert weights.provenance('net.taught') == 'taught by resnet18_cifar'
    assert weights.provenance('richer.begun') == 'begun in rich.begun, taught by resnet18_cifar, resnet_tiny_cifar'


def test_tags_captions_and_tables_name_teacher_and_origin():
    rows = {row['name']: row for row in results_rows()}
    tables = [format_results([*rows.values()], wide=wide).splitlines() for wide in (False, True)]
    for name in weights.checksums():
        began, taught = weights.origin(name), weights.teachers(name)
        tag = name.partition('.')[2] or 'cifar10'
        assert tag == ('from_quadratic_cifar10' if began else 'dist_cifar10' if taught else 'cifar10')
        assert {*taught, *([began] if began else [])} <= set(weights.checksums())
        caption = weights.net_caption(name if '.' in name else f'{name}.cifar10')
        assert weights.provenance(name) in caption and all(other in caption for other in (began, *taught) if other)
        assert (rows[name]['initialised_from'], rows[name]['teacher']) == (began, ', '.join(taught) or None)
        for wide, table in enumerate(tables):
            line = next(line for line in table if line.startswith(f'{name} '))
            shown = [f'{weights.measured_accuracy(name):.4f}', ', '.join(taught) or 'none', *[began or '-'] * wide]
            assert line.split()[3:3 + len(shown)] == shown


def test_captions():
    accuracy = weights.measured_accuracy('sa_learned_tiny_cifar')
    learned = weights.net_caption('sa_learned_tiny_cifar')
    assert learned.endswith(f"{100 * accuracy:.1f} % of CIFAR-10's test images right")
    assert weights.net_caption('sa_quadratic_gen_pruned_cifar.cifar10') == 'its own weights'  # that tag has none
    assert weights.net_caption('sa_learned_tiny_cifar', 'folder/last.pth.tar') == 'weights of last.pth.tar'
    assert weights.net_caption('sa_learned_cifar', untrained=True) == 'untrained'
    for source in ('local-dir:nets/pruned', 'hf-hub:me/pruned'):
        assert weights.net_caption(source) == 'weights of pruned'


@pytest.mark.parametrize('rows, caption', [
    ({'heads': '9'}, 'weights of net'),  # somebody else's card says nothing of teachers
    ({'initialised from': '', 'teacher': 'none'}, 'from scratch, labels only'),
    ({'initialised from': 'rich', 'teacher': 'unknown'}, 'begun in rich, teacher unknown'),
    ({'teacher': 'none', 'epochs': '2', 'validation accuracy': 'high'}, 'from scratch, labels only, 2 epochs'),
    ({'teacher': 'none', 'validation accuracy': '0.5000 (in eval mode)'},
     'from scratch, labels only, 50.0 % of its validation images right'),
])
def test_a_caption_says_no_more_than_the_card_of_a_folder(tmp_path, monkeypatch, rows, caption):
    folder = tmp_path / 'net'
    folder.mkdir()
    (folder / 'README.md').write_text(''.join(f'| {key} | {value} |\n' for key, value in rows.items()))
    monkeypatch.chdir(folder)
    for name in f'local-dir:{folder}', 'local-dir:.':
        assert weights.net_caption(name) == caption
