"""Runs of the trainer: two classes of noise, a net as small as may be."""
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pictures import fill_splits
from timm_selfconv import train
from timm_selfconv.training import trainer


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    return fill_splits(tmp_path_factory.mktemp('noise'), 'airplane', 'automobile')  # eval matches them by name


@pytest.fixture(scope='session')
def small():
    return 'model_kwargs={embed_dim: 8, mlp_dim: 8, depth: 2}'


@pytest.fixture(scope='session')
def run(folder):
    """Trains by the command and returns the last checkpoint."""
    def run(output, *more, data=folder, recipe='muon_tiny'):
        train.main([str(recipe), '--data', str(data), '--output', str(output), 'batch_size=8', *more])
        return torch.load(Path(output) / 'last.pth.tar', weights_only=True)

    return run


@pytest.fixture
def refused(run, capsys):
    """Checks that a run ends in a line of some words, and with exit status 2 if not told another."""
    def refused(message, *command, status=2, **kwargs):
        with pytest.raises(SystemExit) as stopped:
            run(*command, **kwargs)
        error = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == status and re.search(message, error), error

    return refused


@pytest.fixture(scope='session')
def stopped_after():
    """A context in which training ends between the checkpoint of an epoch, counted from 0, and what follows from it."""
    @contextmanager
    def stopped_after(epoch):
        class Enough(Exception):
            pass

        def publish(self, *args):
            if len(self.history) > epoch:
                raise Enough
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
            patch.setattr(trainer.Training, 'publish', publish)
            yield

    return stopped_after
