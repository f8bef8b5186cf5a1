"""Reading and preprocessing of pictures, against PIL and timm."""
from types import SimpleNamespace

import numpy as np
import pytest
import timm
from PIL import Image

from pictures import fill
from timm_selfconv.commands.use import find_pictures
from timm_selfconv.data import match_classes, open_dataset, open_images, sample_pictures, top_classes
from timm_selfconv.training.picture_folder import open_picture_folder

GREY = np.linspace(0, 1, 256).reshape(16, 16)


def test_shades_of_grey_of_any_depth_are_those_of_eight_bits(tmp_path):
    shades = (GREY * 65535).round()
    for name, pixels in ('float.tif', np.float32(GREY)), ('16.png', np.uint16(shades)), ('16.pgm', np.int32(shades)):
        Image.fromarray(pixels).save(tmp_path / name)
        image, = open_images([tmp_path / name])
        assert image.mode == 'RGB' and abs(np.asarray(image)[..., 1] - 255 * GREY).max() <= 0.51
    # of an unknown range
    for mode, pixels in ('F', np.float32(GREY * np.nan)), ('F', np.float32(GREY * 255)), ('I', np.int32(GREY * 255)):
        Image.fromarray(pixels).save(tmp_path / 'grey.tif')
        with pytest.raises(ValueError, match=rf"image '.*grey.tif': mode {mode!r} .*needs 8 or 16 bits"):
            open_images([tmp_path / 'grey.tif'])


def test_labels_that_are_no_class_numbers_are_refused(tmp_path):
    datasets = pytest.importorskip('datasets')
    pictures = dict(img=[Image.new('RGB', (8, 8)) for _ in range(2)], label=[0, 1], shares=[.5, .2])
    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=['a', 'b']), shares=datasets.Value('float32'))
    datasets.Dataset.from_dict(pictures, features=features).to_parquet(tmp_path / 'test-00000-of-00001.parquet')
    assert open_dataset(str(tmp_path), 'test')[1][1] == 1
    with pytest.raises(ValueError, match=r"data=.*target_key='shares': needs a column of class numbers"):
        open_dataset(str(tmp_path), 'test', 'img', 'shares')
    with pytest.raises(ValueError, match=r"needs the columns input_key='image', target_key='shares', has \['img', "):
        open_dataset(str(tmp_path), 'test', 'image', 'shares')
    assert len(sample_pictures(str(tmp_path), 'test', 'img', 2)) == 2  # labels are not read


@pytest.mark.parametrize('name,value', [
    ('interpolation', 'x'), ('input_size', (3, -1, -1)), ('label_names', 'abcdefghij')])
def test_a_bad_configuration_is_refused(name, value):
    """A net from the Hub can have such a configuration."""
    model = timm.create_model('resnet_tiny_cifar', channels=(8,) * 4, pretrained_cfg_overlay={name: value})
    with pytest.raises(ValueError, match=rf'configuration .*{name}.*(cannot be used|needs a list of names)'):
        top_classes(model, [Image.new('RGB', (40, 40))], 1)


def test_hidden_things_are_no_data(tmp_path, caplog):
    """finetune, train, eval and classify ignore hidden files."""
    fill(tmp_path, ['dog', 'cat'], 3)
    shown = sorted(map(str, tmp_path.rglob('*.png')))
    fill(tmp_path, ['.ipynb_checkpoints', '.git/objects', '__MACOSX/cat', 'cat/.thumbs', 'Thumbs.db'], 1)
    for name in ('cat/._0.png', 'dog/.hid.png', '.train-00000.parquet'):
        (tmp_path / name).write_bytes(b'no picture')
    train, held, _ = open_picture_folder(tmp_path, 1)
    dataset = open_dataset(str(tmp_path), 'test')
    for each in (train, held, dataset):
        assert each.reader.class_to_idx == dict(cat=0, dog=1)
    trained = sorted(file for each in (train, held) for file, _ in each.reader.samples)
    assert trained == [file for file, _ in dataset.reader.samples] == shown
    assert [*map(str, find_pictures([str(tmp_path)]))] == shown
    assert caplog.text.count(f'{tmp_path}: 7 hidden files are ignored') == 3


def classes(names, *folders):
    """How folders are matched with the names of a net."""
    reader = SimpleNamespace(class_to_idx={name: i for i, name in enumerate(folders)})
    return match_classes(
        SimpleNamespace(pretrained_cfg=dict(label_names=names)), SimpleNamespace(reader=reader))


def test_names_are_matched_loosely_only_if_they_stay_distinct():
    """Folders of numbers are names of the net, or the numbers of its classes."""
    assert classes(['a_b', 'a-b'], 'a-b', 'a_b') == {0: 1, 1: 0}
    assert classes(['Cat', 'fire truck'], 'cat', 'fire_truck') == {0: 0, 1: 1}
    assert classes(list('123456789'), '1', '2', '9') == {0: 0, 1: 1, 2: 8}
    assert classes(None, '3', '7') == {0: 3, 1: 7} and classes(None, 'cat', '7') is None
    assert classes(['cat', 'dog']) is None  # a dataset without names
    for names, folders in ('Aab', 'Ba'), ('123456789', '012'), (['cat', 'dog', 'eel'], '012'):  # loosely, A is a
        with pytest.raises(ValueError, match=rf'the dataset has \[{folders[0]!r}, '):
            classes(list(names), *folders)


def test_files_that_are_no_picture_are_named(tmp_path, monkeypatch):
    """PIL raises many types of errors. A turned photograph is read upright."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.new('RGB', (9, 5)).save(tmp_path / 'turned.jpg', exif=exif)
    assert open_images([tmp_path / 'turned.jpg'])[0].size == (5, 9)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 64 * 64)  # twice as many are a decompression bomb
    Image.new('L', (128, 128)).save(tmp_path / 'bomb.png')
    Image.new('L', (7, 9)).save(tmp_path / 'tag.tif')
    content = bytearray((tmp_path / 'tag.tif').read_bytes())
    content[72] = 2  # a TypeError
    (tmp_path / 'tag.tif').write_bytes(content)
    (tmp_path / 'text.png').write_text('not a picture')
    for name in ('bomb.png', 'tag.tif', 'text.png', '.'):
        with pytest.raises(ValueError, match=r'image .*: needs a readable picture file'):
            open_images([tmp_path / name])
    with pytest.raises(ValueError, match=r'nowhere.png: no such file'):
        open_images([tmp_path / 'nowhere.png'])
