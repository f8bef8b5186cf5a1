"""Shared fixtures: folders from environment variables (tests are skipped without them), nets, the client of the Hub."""
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch

import timm_selfconv  # noqa: F401  registers the nets
from timm_selfconv.cli import main
from tiny_nets import small_sizes

# torch reads it once per process, and a test that profiles must not print in later tests of commands
os.environ.setdefault('KINETO_LOG_LEVEL', '99')


@pytest.fixture(scope='session')
def repo():
    return Path(__file__).resolve().parent.parent


def folder_of(variable, content):
    """Make a fixture that returns the folder in an environment variable."""
    @pytest.fixture(scope='session')
    def folder():
        if not os.environ.get(variable):
            pytest.skip(f'{variable} names no folder with {content}')
        return os.environ[variable]

    return folder


cifar10 = folder_of('CIFAR10', "CIFAR-10 in the Hub's parquet layout")
timm_scripts = folder_of('TIMM_SCRIPTS', "timm's scripts")
timm_tests = folder_of('TIMM_TESTS', "timm's sdist")


@pytest.fixture
def as_a_script(monkeypatch):
    """Restore arguments, paths and logging after a script changed them."""
    monkeypatch.setattr(sys, 'argv', sys.argv)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setattr(logging.root, 'handlers', list(logging.root.handlers))
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture(scope='session')
def images():
    """Make noise of any shape, always the same."""
    return lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope='session')
def small_net():
    """Make narrow, shallow nets of the zoo by name."""
    return lambda name, **kwargs: timm.create_model(name, **{**small_sizes(name), **kwargs})


@pytest.fixture
def output_of(capsys):
    """Run a command and return what it prints on stdout."""
    def output_of(*words):
        main([str(word) for word in words])
        return capsys.readouterr().out

    return output_of


@pytest.fixture
def refused(capsys):
    """Check that a command fails with exit status 2 and one line on stderr with some words."""
    def refused(message, command):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in command])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error, error
        assert error.count('\n') == 1 and len(error) < 800

    return refused


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Change constants of the Hub's client, which reads the environment only on import."""
    def change(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
        if 'ENDPOINT' in constants:
            template = constants['ENDPOINT'] + '/{repo_id}/resolve/{revision}/{filename}'
            change(HUGGINGFACE_CO_URL_TEMPLATE=template)
            # before 1.0 a module keeps its own copy
            monkeypatch.setattr('huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE', template, raising=False)
        getattr(huggingface_hub.utils._http, 'reset_sessions', bool)()  # before 1.0 a session stays offline

    def connect(self, address):
        assert address[0] == '127.0.0.1', f'goes out to {address}'
        return real(self, address)

    real = socket.socket.connect
    monkeypatch.setattr(socket.socket, 'connect', connect)
    change(HF_HUB_CACHE=str(tmp_path / 'cache'), HF_HUB_OFFLINE=False, HF_HUB_ETAG_TIMEOUT=1, HF_HUB_DOWNLOAD_TIMEOUT=5)
    return change


@pytest.fixture
def limit():
    """Limit the size of files in this context, in bytes."""
    resource = pytest.importorskip('resource')

    @contextlib.contextmanager
    def limit(nbytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
