"""Weight files, folders and model cards are complete, and timm, transformers and the Hub read them."""
import re

import pytest
import safetensors.torch
import timm
import torch
import torch.nn as nn
from huggingface_hub import ModelCard

from timm_selfconv import files, weights
from timm_selfconv.measure.tables import zoo_counts
from timm_selfconv.weights import WEIGHTS_DIR, saving


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


def test_cards_are_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, 'WEIGHTS_DIR', tmp_path)
    assert weights.measured_accuracy('net') is None and weights.card_facts('net') == {}
    facts = dict(recipe='recipes/net.yaml', seed='42', time='36 minutes', license='apache-2.0',
                 arguments='lr=0.1\nphase 2: lr=0.2')
    text = saving.model_card('net', 'A net.', 0.8123, 10000, facts)
    files.write_new(weights.card_path('net'), text.encode())
    assert weights.measured_accuracy('net') == 0.8123
    card = ModelCard.load(weights.card_path('net'))
    assert card.data.license == 'apache-2.0' and card.data.library_name == 'timm'
    assert [result.metric_value for result in card.data.eval_results] == [0.8123]  # the Hub shows it
    assert '```text\nlr=0.1\nphase 2: lr=0.2\n```' in text and '±0.8 points' in text  # 1.96 standard deviations
    assert "create_model('net.cifar10', " in text and 'explore net.cifar10 ' in text  # the tag, not the default
    read = weights.card_facts('net')
    assert read.pop('test accuracy').startswith('0.8123 (10,000 images') and read == facts


def test_all_shipped_weights_have_a_card_of_todays_form():
    for path in WEIGHTS_DIR.glob('*.safetensors'):
        name, facts, text = path.stem, weights.card_facts(path.stem), weights.card_path(path.stem).read_text()
        accuracy, counts = weights.measured_accuracy(name), zoo_counts()[name.partition('.')[0]]
        assert {'input', 'classes', 'recipe', 'epochs', 'seed', 'hardware', 'teacher', 'initialised from'} <= {*facts}
        assert facts.pop('test accuracy') and 0.5 < accuracy < 1
        summary, = re.findall(f'^# {name}\n\n(.*)$', text, re.MULTILINE)
        assert text == saving.model_card(name, summary, accuracy, 10000, facts)
        assert facts['parameters'] == f"{counts['parameters']:,}"
        assert facts['multiply-adds'] == f"{counts['flops'] // 2:,}"
        assert files.sha256(path) == weights.checksums()[name] == facts['SHA-256']


@pytest.mark.slow
def test_folders_are_read_by_timm_and_by_transformers(small_net, images, tmp_path):
    transformers = pytest.importorskip('transformers')
    net, x = small_net('sa_quadratic_cifar', num_classes=3, img_size=16).eval(), images(2, 3, 16, 16)
    for labels, folder in ((('one', 'two', 'three'), tmp_path / 'own'), (None, tmp_path / 'unnamed')):
        net.pretrained_cfg['label_names'] = labels
        saving.save_folder(net, folder)
        safetensors.torch.save_file(  # a file in float16 is computed with in float32
            {key: v.half() if v.is_floating_point() else v for key, v in net.state_dict().items()},
            folder / 'model.safetensors', metadata=dict(format='pt'))
        by_timm = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
        by_transformers = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        logits = by_transformers(x).logits
        torch.testing.assert_close(logits, by_timm(x), rtol=0, atol=0)
        assert logits.dtype == torch.float32 and logits.shape == (2, 3)
        assert [*by_transformers.config.id2label.values()] == [*(labels or ('LABEL_0', 'LABEL_1', 'LABEL_2'))]
        assert by_timm.pretrained_cfg.get('label_names') == (labels and [*labels])


def test_checksums_are_sorted_one_a_file(tmp_path):
    for name, digit in (('b', '0'), ('c', '1'), ('b', '2'), ('a', '3')):
        saving.record_checksum(tmp_path / f'{name}.safetensors', 64 * digit)
    assert (tmp_path / 'SHA256SUMS').read_text() == ''.join(
        f'{64 * digit}  {name}.safetensors\n' for name, digit in (('a', '3'), ('b', '2'), ('c', '1')))
