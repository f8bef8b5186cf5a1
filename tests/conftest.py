"""What tests share: paths, folders that the environment names (tests skip without), images, small nets."""
import contextlib
import os
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import set_fused_attn

import timm_selfconv  # noqa: F401  registers the nets

# torch reads it once a process: a test that profiles must not let it talk in a later one that runs a command
os.environ.setdefault('KINETO_LOG_LEVEL', '99')


@pytest.fixture(scope='session')
def repo():
    return Path(__file__).resolve().parent.parent


def folder(variable, content):
    if not os.environ.get(variable):
        pytest.skip(f'{variable} names no folder with {content}')
    return os.environ[variable]


@pytest.fixture(scope='session')
def cifar10():
    return folder('CIFAR10', "CIFAR-10 in the Hub's parquet layout")


@pytest.fixture(scope='session')
def timm_scripts():
    return folder('TIMM_SCRIPTS', "timm's scripts")


@pytest.fixture(scope='session')
def timm_tests():
    return folder('TIMM_TESTS', "timm's sdist")


@pytest.fixture(scope='session')
def images():
    """Noise of any shape, always the same."""
    return lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope='session')
def small_net():
    """Makes nets of the zoo, by name, too narrow and shallow to take time."""
    def create(name, **kwargs):
        if name.startswith('san_'):
            small = dict(channels=(32,) * 4)
        elif name.startswith('resnet'):
            small = dict(channels=(8,) * 4)
        else:
            small = dict(embed_dim=16, mlp_dim=24, depth=3, num_heads=2)
        if name.startswith('resvit_'):
            small['stem_dim'] = 4
        return timm.create_model(name, **dict(small, **kwargs))

    return create


@pytest.fixture(scope='session')
def explicit_maps():
    """A context in which nets are made with explicit attention maps, by timm's own switch."""
    @contextlib.contextmanager
    def switched_off():
        set_fused_attn(False)
        try:
            yield
        finally:
            set_fused_attn(True)

    return switched_off
