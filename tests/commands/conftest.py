"""What tests of commands share: weights and pictures on disk."""
import pytest
import timm
from PIL import Image

from timm_selfconv.weights.saving import save_weights


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / 'net.safetensors'
    save_weights(timm.create_model('sa_quadratic_tiny_cifar'), file)
    return str(file)


@pytest.fixture
def folder(tmp_path):
    """A dataset of one picture a class."""
    for label in range(10):
        (tmp_path / 'data' / 'test' / str(label)).mkdir(parents=True)
        Image.new('RGB', (40, 30), (25 * label,) * 3).save(tmp_path / 'data' / 'test' / str(label) / 'picture.png')
    return str(tmp_path / 'data')
