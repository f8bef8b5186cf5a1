"""Augmentation of batches, against timm and PIL on single images."""
import random

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing

from timm_selfconv.data import load_images, open_dataset
from timm_selfconv.training.augment import Augment, at_size, padded_crop, random_erasing, random_resized_crop
from timm_selfconv.training.recipes import read_recipe


@pytest.mark.parametrize('mode', ['constant', 'reflect'])
def test_padded_crops_are_all_the_windows_of_the_padded_image(mode):
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    crops = padded_crop(image.expand(600, -1, -1, -1), 2, mode)
    padded = np.pad(image[0].numpy(), ((0, 0), (2, 2), (2, 2)), mode)
    windows = {padded[:, i:i + 5, j:j + 6].tobytes() for i in range(5) for j in range(5)}
    assert {crop.numpy().tobytes() for crop in crops} == windows  # of 600 draws each of 25 is missed with odds 1e-9


@pytest.mark.parametrize('interpolation,kind,tolerance', [
    ('bilinear', Image.Resampling.BILINEAR, 1.01), ('bicubic', Image.Resampling.BICUBIC, 16)])
def test_resized_crops_are_pil_s(monkeypatch, interpolation, kind, tolerance):
    """Only the interior: at the border, grid_sample reads pixels around the window, and cubic kernels differ."""
    smooth = np.add.outer(np.linspace(0, 120, 32), np.linspace(0, 120, 32))[..., None] * np.array([1, .5, .9])
    picture = (smooth + 8 * np.sin(np.arange(32))[:, None, None]).astype(np.uint8)
    size, corner = torch.tensor([[0.3, 0.6], [0.2, 0.7]]), torch.tensor([[0.1, 0.99], [0.5, 0.99]])
    drawn = {3: torch.cat([torch.ones(2, 1, 2), size[:, None].expand(-1, 9, -1)], 1), 2: corner}  # no fit at first
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


@pytest.mark.parametrize('size', [24, 40])
def test_images_are_resized_as_pil_does(size):
    image = torch.rand(32, 32)
    wanted = np.asarray(Image.fromarray(image.numpy()).resize((size, size), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(at_size(image.expand(2, 3, -1, -1), size)[1, 2], wanted, atol=1e-5)


def test_images_are_normalised_as_timm_does(folder):
    args = read_recipe('muon_tiny', ['crop_padding=null', 'hflip=0', 'scale=[1, 1]', 'ratio=[1, 1]'])
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8)
    augment = Augment(args, model, torch.device('cpu'))
    images, labels = load_images(open_dataset(str(folder), 'test'), model, torch.device('cpu'))
    assert images.dtype == torch.uint8 and labels.tolist() == [0, 0, 0, 1, 1, 1]
    transform = create_transform(**timm.data.resolve_data_config({}, model=model))
    wanted = torch.stack([transform(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images])
    torch.testing.assert_close(augment.normalize(images), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(augment(images), wanted, rtol=0, atol=1e-5)


def test_erasing_is_timms_in_distribution():
    torch.manual_seed(0)
    random.seed(0)
    x = torch.zeros(4000, 1, 16, 16)
    noise = random_erasing(x, 0.4)
    ours, theirs = (y[:, 0] != 0 for y in (noise, RandomErasing(0.4, mode='pixel', device='cpu')(x.clone())))
    assert abs(noise[noise != 0].mean()) < 0.01 and noise[noise != 0].std() == pytest.approx(1, abs=0.01)
    hits = [mask.flatten(1).any(1) for mask in (ours, theirs)]
    assert hits[0].float().mean() == pytest.approx(hits[1].float().mean().item(), abs=0.05)  # five standard deviations
    torch.testing.assert_close(ours.float().mean(0), theirs.float().mean(0), rtol=0, atol=0.035)  # pixel by pixel
    for dim in (1, 2):  # widths and heights of what was erased, by their cumulated distribution
        sides = [mask.any(dim).sum(1)[hit].bincount(minlength=17).cumsum(0) / hit.sum() for mask, hit in zip(
            (ours, theirs), hits)]
        torch.testing.assert_close(*sides, rtol=0, atol=0.08)
    boxes = ours.any(1).sum(1) * ours.any(2).sum(1)
    assert torch.equal(boxes, ours.sum((1, 2)))
