"""What becomes of images before a net sees them, against PIL's and timm's own."""
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from timm_selfconv.data import at_size, classify, open_dataset, open_images, padded_crop, random_resized_crop, \
    sample_pictures

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
    assert len(sample_pictures(str(tmp_path), 'test', None, 'img', 2)) == 2  # nobody looks at labels


@pytest.mark.parametrize('name,value', [
    ('interpolation', 'x'), ('mean', 'red'), ('std', [0.5, 0.5]), ('input_size', (3, -1, -1)), ('crop_pct', 'much'),
    ('label_names', 5), ('label_names', 'abcdefghij')])
def test_a_configuration_that_makes_no_sense_is_refused(name, value):
    """As one from the Hub may be."""
    model = timm.create_model('resnet_tiny_cifar', channels=(8,) * 4, pretrained_cfg_overlay={name: value})
    with pytest.raises(ValueError, match=rf'configuration .*{name}.*(cannot be used|needs a list of names)'):
        classify(model, [Image.new('RGB', (40, 40))])


def test_padded_crops_are_all_the_windows_of_the_padded_image():
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    crops = padded_crop(image.expand(600, -1, -1, -1), 2)
    padded = F.pad(image[0], (2, 2, 2, 2))
    windows = {padded[:, i:i + 5, j:j + 6].numpy().tobytes() for i in range(5) for j in range(5)}
    assert {crop.numpy().tobytes() for crop in crops} == windows  # of 600 draws each of 25 is missed with odds 1e-9


@pytest.mark.parametrize('interpolation,kind,tolerance', [
    ('bilinear', Image.Resampling.BILINEAR, 1.01), ('bicubic', Image.Resampling.BICUBIC, 16)])
def test_resized_crops_are_pil_s(monkeypatch, interpolation, kind, tolerance):
    """The interior: at its border PIL sees the window alone, grid_sample what lies around it (and cubics differ)."""
    smooth = np.add.outer(np.linspace(0, 120, 32), np.linspace(0, 120, 32))[..., None] * np.array([1, .5, .9])
    picture = (smooth + 8 * np.sin(np.arange(32))[:, None, None]).astype(np.uint8)
    size, corner = torch.tensor([[0.3, 0.6], [0.2, 0.7]]), torch.tensor([[0.1, 0.99], [0.5, 0.99]])
    drawn = {3: torch.cat([torch.ones(2, 1, 2), size[:, None].expand(-1, 9, -1)], 1), 2: corner}  # the first won't fit
    monkeypatch.setattr(torch, 'rand', lambda *shape, **kwargs: drawn[len(shape)])
    x = torch.from_numpy(picture).permute(2, 0, 1).float().expand(2, -1, -1, -1)
    ours = random_resized_crop(x, (0.5, 1.), (0.8, 1.25), interpolation)
    for image, (u_area, u_aspect, u_top, u_left) in zip(ours, torch.cat([size, corner]).T.tolist()):
        area, aspect = 1024 * (0.5 + 0.5 * u_area), 0.8 * (1.25 / 0.8) ** u_aspect
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        assert w <= 32 and h <= 32
        top, left = int(u_top * (33 - h)), int(u_left * (33 - w))
        wanted = Image.fromarray(picture).crop((left, top, left + w, top + h)).resize((32, 32), kind)
        difference = image.permute(1, 2, 0).numpy() - np.asarray(wanted, dtype=float)
        assert np.abs(difference[2:-2, 2:-2]).max() < tolerance


@pytest.mark.parametrize('size', [16, 24, 32, 40])
def test_images_are_resized_as_pil_does(size):
    image = torch.rand(32, 32)
    wanted = np.asarray(Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(at_size(image.expand(2, 3, -1, -1), size)[1, 2], wanted, atol=1e-5)
