"""Runs of the trainer: two classes of noise, a net as small as may be."""
import re
from contextlib import nullcontext
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
def own(tmp_path_factory):
    """Classes that no net has, pictures of another size and shape."""
    return fill_splits(tmp_path_factory.mktemp('own'), 'cow', 'ant', size=(40, 50))


@pytest.fixture(scope='session')
def run(folder):
    """Trains by the command and returns the last checkpoint; ``until`` ends it after that of an epoch, from 0."""
    class Enough(Exception):
        pass

    def run(output, *more, data=folder, recipe='muon_tiny', until=None):
        def publish(self, *args):
            if len(self.history) > until:
                raise Enough

        with pytest.MonkeyPatch.context() as patch, nullcontext() if until is None else pytest.raises(Enough):
            if until is not None:
                patch.setattr(trainer.Training, 'publish', publish)
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
