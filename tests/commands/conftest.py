"""Weights and pictures for tests of commands."""
import pytest
import timm
from timm.models import save_for_hf

from pictures import fill
from timm_selfconv.models import CIFAR10_CLASSES
from timm_selfconv.weights.saving import save_weights


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / 'net.safetensors'
    save_weights(timm.create_model('sa_quadratic_tiny_cifar'), file)
    return str(file)


@pytest.fixture
def little(tmp_path):
    """A net with one layer, which trains and runs fast."""
    model = timm.create_model('sa_quadratic_cifar', depth=1, num_heads=2, embed_dim=8, mlp_dim=8, patch_size=8)
    save_for_hf(model, tmp_path / 'little', safe_serialization=True)
    return f"local-dir:{tmp_path / 'little'}"


@pytest.fixture
def folder(tmp_path):
    """A dataset with one picture for each class of the zoo."""
    return fill(tmp_path / 'data' / 'test', CIFAR10_CLASSES, size=(30, 40)).parent
