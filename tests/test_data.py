"""What becomes of images before a net sees them, against PIL's and timm's own."""
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import IterableImageDataset

from timm_selfconv import data
from timm_selfconv.data import classify, load_images, open_dataset, open_images, sample_pictures

GREY = np.linspace(0, 1, 256).reshape(16, 16)


@pytest.mark.parametrize('ending,pixels', [
    ('tif', GREY.astype(np.float32)), ('tif', (GREY * 65535).round().astype(np.uint16)),
    ('pfm', GREY.astype(np.float32)), ('png', (GREY * 65535).round().astype(np.uint16)),
    ('pgm', (GREY * 65535).round().astype(np.int32)),
], ids=['float', '16 bits', 'float map', '16 bits PNG', '16 bits PGM'])
def test_shades_of_grey_of_any_depth_are_those_of_eight_bits(tmp_path, ending, pixels):
    file = tmp_path / f'grey.{ending}'
    Image.fromarray(pixels).save(file, format='PPM' if ending == 'pfm' else None)
    image, = open_images([file])
    assert image.mode == 'RGB' and abs(np.asarray(image)[..., 1] - 255 * GREY).max() <= 0.51


def float_picture(*values):
    return np.array([values] * 2, np.float32)


@pytest.mark.parametrize('pixels,mode', [
    (float_picture(0, .5, float('nan')), 'F'), (float_picture(0, float('inf')), 'F'), (float_picture(0, 99, 255), 'F'),
    (float_picture(-.1, .5), 'F'), ((GREY * 255).astype(np.int32), 'I'), ((GREY * 65535).astype(np.int32), 'I'),
    ((GREY * 2e9).astype(np.int32), 'I')])
def test_pictures_whose_black_and_white_nobody_knows_are_refused(tmp_path, pixels, mode):
    Image.fromarray(pixels).save(tmp_path / 'grey.tif')
    with pytest.raises(ValueError, match=rf"image '.*grey.tif': mode {mode!r} .*needs 8 or 16 bits"):
        open_images([tmp_path / 'grey.tif'])


@pytest.mark.parametrize('key', ['img', 'words', 'shares'])
def test_labels_that_are_no_class_numbers_are_refused(tmp_path, key):
    datasets = pytest.importorskip('datasets')
    pictures = dict(img=[Image.new('RGB', (8, 8)) for _ in range(2)], label=[0, 1], words=['a', 'b'], shares=[.5, .2])
    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=['a', 'b']), words=datasets.Value('string'),
        shares=datasets.Value('float32'))
    datasets.Dataset.from_dict(pictures, features=features).to_parquet(tmp_path / 'test-00000-of-00001.parquet')
    assert open_dataset(str(tmp_path), 'test', None, 'img', 'label')[1][1] == 1
    with pytest.raises(ValueError, match=rf"data=.*target_key='{key}': needs a column of class numbers"):
        open_dataset(str(tmp_path), 'test', None, 'img', key)
    assert len(sample_pictures(str(tmp_path), 'test', None, 'img', 2)) == 2  # labels are not read


def test_streams_are_refused_where_pictures_need_numbers(monkeypatch):
    stream = IterableImageDataset('', reader=[])
    monkeypatch.setattr(data, 'open_dataset', lambda *args: stream)
    for take in (lambda: sample_pictures('hfids/x', 'test', None, 'img', 2),
                 lambda: load_images(stream, torch.nn.Identity(), torch.device('cpu'))):
        with pytest.raises(ValueError, match='is a stream'):
            take()


@pytest.mark.parametrize('name,value', [
    ('interpolation', 'x'), ('mean', 'red'), ('std', [0.5, 'much']), ('input_size', (3, -1, -1)), ('crop_pct', 'much'),
    ('label_names', 5), ('label_names', 'abcdefghij')])
def test_a_configuration_that_makes_no_sense_is_refused(name, value):
    """As one from the Hub may be."""
    model = timm.create_model('resnet_tiny_cifar', channels=(8,) * 4, pretrained_cfg_overlay={name: value})
    with pytest.raises(ValueError, match=rf'configuration .*{name}.*(cannot be used|needs a list of names)'):
        classify(model, [Image.new('RGB', (40, 40))])
