"""Augmentation of batches, against timm and PIL on single images."""
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

from timm_selfconv.data import load_images, open_dataset
from timm_selfconv.training.augment import Augment, at_size, padded_crop
from timm_selfconv.training.recipes import read_recipe


@pytest.mark.parametrize('mode', ['constant', 'reflect'])
def test_padded_crops_are_all_the_windows_of_the_padded_image(mode):
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    crops = padded_crop(image.expand(600, -1, -1, -1), 2, mode)
    padded = np.pad(image[0].numpy(), ((0, 0), (2, 2), (2, 2)), mode)
    windows = {padded[:, i:i + 5, j:j + 6].tobytes() for i in range(5) for j in range(5)}
    assert {crop.numpy().tobytes() for crop in crops} == windows  # of 600 draws each of 25 is missed with odds 1e-9


@pytest.mark.parametrize('size', [24, 40])
def test_images_are_resized_as_pil_does(size):
    image = torch.rand(32, 32)
    wanted = np.asarray(Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(at_size(image.expand(2, 3, -1, -1), size)[1, 2], wanted, atol=1e-5)
    assert at_size(torch.rand(2, 3, 32, size), size).shape == (2, 3, size, size)


def test_images_are_normalised_as_timm_does(folder):
    args = read_recipe('muon_tiny', ['crop_padding=0', 'hflip=0'])
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8)
    augment = Augment(args, model, torch.device('cpu'))
    images, labels = load_images(open_dataset(str(folder), 'test'), model, torch.device('cpu'))
    assert images.dtype == torch.uint8 and labels.tolist() == [0, 0, 0, 1, 1, 1]
    transform = create_transform(**timm.data.resolve_data_config({}, model=model))
    wanted = torch.stack([transform(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images])
    torch.testing.assert_close(augment.normalize(images), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(augment(images), wanted, rtol=0, atol=1e-5)
