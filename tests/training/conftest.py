"""Runs of the trainer with two classes of noise and a very small net."""
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from pictures import fill_splits
from timm_selfconv.cli import main
from timm_selfconv.data import load_images, open_dataset
from timm_selfconv.training import trainer
from timm_selfconv.training.net import create_net
from timm_selfconv.training.recipes import read_recipe
from tiny_nets import SMALL


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    return fill_splits(tmp_path_factory.mktemp('noise'), 'airplane', 'automobile')  # eval matches them by name


@pytest.fixture(scope='session')
def own(tmp_path_factory):
    """A dataset with new classes and with pictures of another size and shape."""
    return fill_splits(tmp_path_factory.mktemp('own'), 'cow', 'ant', size=(40, 50))


@pytest.fixture(scope='session')
def run(folder):
    """Train in float32 with the command and return the last checkpoint; ``until`` stops it after an epoch."""
    save = trainer.Training.save

    def run(output, *more, data=folder, recipe='muon_tiny', until=None):
        def save_until(self, output):
            save(self, output)
            if until is not None and len(self.history) > until:
                raise KeyboardInterrupt

        words = ['train', str(recipe), '--data', str(data), '--output', str(output), 'batch_size=8', 'amp=false', *more]
        stopped = nullcontext() if until is None else pytest.raises(KeyboardInterrupt)
        with mock.patch.object(trainer.Training, 'save', save_until), stopped:
            main(words)
        return torch.load(output / 'last.pth.tar', weights_only=True)

    return run


@pytest.fixture
def refused(run, capsys):
    """Check that a run fails with some words on one line, by default with exit status 2."""
    def refused(message, *command, status=2, **kwargs):
        with pytest.raises(SystemExit) as stopped:
            run(*command, **kwargs)
        error = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == status and re.search(message, error), error

    return refused


@pytest.fixture(scope='session')
def training(folder):
    """Make trainings of the small net on whole images of one size, to run step by step."""
    def make(*overrides):
        args = read_recipe(
            'muon_tiny', ['crop_padding=0', 'img_sizes={}', 'batch_size=8', 'amp=null', SMALL, *overrides])
        net = create_net(args, dataset := open_dataset(str(folder), 'train'))
        return trainer.Training(args, net, load_images(dataset, net, torch.device('cpu')))

    return make
