"""Accuracies of a classifier with known answers; shipped nets reach their cards."""
import pytest
import timm
import torch
from PIL import Image

from timm_selfconv.measure.evaluation import evaluate, is_cifar10_test
from timm_selfconv.measure.tables import zoo_counts
from timm_selfconv.models import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD
from timm_selfconv.weights import WEIGHTS_DIR, measured_accuracy


class RedMeter(torch.nn.Module):
    """Classifies pictures by their red: class i wins at red = i / 10."""
    num_classes, pretrained_cfg = 10, dict(
        input_size=(3, 8, 8), mean=CIFAR10_MEAN, std=CIFAR10_STD, crop_pct=1.0, label_names=CIFAR10_CLASSES)

    def forward(self, x):
        red = x[:, 0].mean((1, 2)) * CIFAR10_STD[0] + CIFAR10_MEAN[0]
        return -100 * (red[:, None] - torch.arange(10) / 10).abs()


def picture(label):
    return Image.new('RGB', (8, 8), (round(255 * label / 10), 0, 0))


@pytest.fixture
def folder(tmp_path):
    """Two pictures per class. The pictures of class 9 look like class 6 (class 9 is the sixth guess) and class 8."""
    for label, name in enumerate(CIFAR10_CLASSES):
        (tmp_path / 'test' / name).mkdir(parents=True)
        for i, seen in enumerate((label, label) if label < 9 else (6.4, 8)):
            picture(seen).save(tmp_path / 'test' / name / f'{i}.png')
    return tmp_path


def test_accuracies_of_a_classifier_that_is_known(folder):
    result = evaluate(model := RedMeter(), str(folder), batch_size=3)
    assert result.images == 20 and result.images_per_second > 0 and model.training
    assert (result.top1, result.top5) == pytest.approx((18 / 20, 19 / 20))  # the top 5 of the picture like 8 include 9
    assert result.per_class == {**dict.fromkeys(CIFAR10_CLASSES, 1), 'truck': 0}
    assert list(result.per_class) == list(CIFAR10_CLASSES)


def test_folders_are_matched_by_name_not_by_position(tmp_path):
    for name in ('cat', 'dog', 'Ship'):
        (tmp_path / name).mkdir()
        picture(CIFAR10_CLASSES.index(name.lower())).save(tmp_path / name / 'a.png')
    assert evaluate(RedMeter(), str(tmp_path)).per_class == dict(cat=1., dog=1., ship=1.)
    (tmp_path / 'Ship').rename(tmp_path / 'boat')
    with pytest.raises(ValueError, match=r"\['boat', 'cat', 'dog'\], the model has \['airplane'"):
        evaluate(RedMeter(), str(tmp_path))
    with pytest.raises(ValueError, match=r"classes: the dataset has \[''\]"):  # of a folder without folders
        evaluate(RedMeter(), str(tmp_path / 'cat'))


def test_the_hub_s_label_names_are_matched_too(tmp_path):
    datasets = pytest.importorskip('datasets')
    names = ['ship', 'cat']  # labels 0 and 1
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(names=names))
    pictures = dict(img=[picture(CIFAR10_CLASSES.index(name)) for name in names], label=[0, 1])
    datasets.Dataset.from_dict(pictures, features=features).to_parquet(tmp_path / 'test-00000-of-00001.parquet')
    assert evaluate(RedMeter(), str(tmp_path)).per_class == dict(cat=1., ship=1.)
    with pytest.raises(ValueError, match=r'needs the columns'):
        evaluate(RedMeter(), str(tmp_path), target_key='fine_label')


def test_data_splits_labels_and_pictures_that_do_not_fit_are_named(folder):
    for data in ('nowhere', 'torch/cifar10'):
        with pytest.raises(ValueError, match=rf"data='{data}'.*folder or a dataset of the Hub"):
            evaluate(RedMeter(), data)
    for data, split in (folder, 'train'), (folder, 'test[:5]'), (folder / 'test', 'test[:5]'):
        with pytest.raises(ValueError, match=r"split='.*': needs one of \['test'\]"):
            evaluate(RedMeter(), str(data), split=split)
    assert evaluate(RedMeter(), str(folder / 'test')).images == 20  # a folder of classes has no splits
    with pytest.raises(ValueError, match=r'data=.*labels from 0 to 9.*4 classes'):
        evaluate(timm.create_model('sa_quadratic_tiny_cifar', num_classes=4, depth=1), str(folder))
    file = folder / 'test' / 'cat' / '0.png'  # timm would replace it by another
    Image.effect_noise((64, 64), 50.).save(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"image '.*cat/0.png': needs a readable picture"):
        evaluate(RedMeter(), str(folder))


def test_cifar10_is_recognised(cifar10, folder):
    assert is_cifar10_test(RedMeter(), cifar10)
    assert not is_cifar10_test(RedMeter(), str(folder))


@pytest.mark.slow
@pytest.mark.parametrize('name', [p.stem for p in sorted(WEIGHTS_DIR.glob('*.safetensors'))])
def test_shipped_nets_reach_the_accuracy_of_their_cards(name, cifar10):
    """On the first 500 images, 40 for large nets, to four standard deviations of the binomial distribution."""
    card, images = measured_accuracy(name), 40 if zoo_counts()[name.split('.')[0]]['flops'] > 1e9 else 500
    result = evaluate(timm.create_model(name, pretrained=True), cifar10, split=f'test[:{images}]')
    assert result.images == images
    assert result.top1 == pytest.approx(card, abs=4 * (card * (1 - card) / images) ** 0.5)
