"""Runs of the trainer: two classes of noise, a net as small as may be."""
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pictures import fill_splits
from timm_selfconv.cli import main
from timm_selfconv.data import load_images, open_dataset
from timm_selfconv.training import trainer
from timm_selfconv.training.net import create_net
from timm_selfconv.training.recipes import read_recipe
from tiny_nets import LIKE_TIMM, SMALL


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    return fill_splits(tmp_path_factory.mktemp('noise'), 'airplane', 'automobile')  # eval matches them by name


@pytest.fixture(scope='session')
def own(tmp_path_factory):
    """Classes that no net has, pictures of another size and shape."""
    return fill_splits(tmp_path_factory.mktemp('own'), 'cow', 'ant', size=(40, 50))


@pytest.fixture(scope='session')
def run(folder):
    """Trains in float32 by the command and returns the last checkpoint; ``until`` kills it after an epoch, from 0."""
    class Killed(Exception):
        pass

    save = trainer.Training.save

    def run(output, *more, data=folder, recipe='muon_tiny', until=None):
        def save_until(self, output):
            save(self, output)
            if until is not None and len(self.history) > until:
                raise Killed

        words = ['train', str(recipe), '--data', str(data), '--output', str(output), 'batch_size=8', 'amp=false', *more]
        with pytest.MonkeyPatch.context() as patch, nullcontext() if until is None else pytest.raises(Killed):
            patch.setattr(trainer.Training, 'save', save_until)
            main(words)
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
def training(folder):
    """Makes trainings of the small net, augmented as timm does, to be led by hand."""
    def make(*overrides, kind=trainer.Training):
        args = read_recipe('muon_tiny', [*LIKE_TIMM, 'batch_size=8', 'amp=null', SMALL, *overrides])
        net = create_net(args, dataset := open_dataset(str(folder), 'train'))
        return kind(args, net, load_images(dataset, net, torch.device('cpu')))

    return make


@pytest.fixture(scope='session')
def one_epoch():
    """Trains one epoch and returns its loss; the next one follows it."""
    def one_epoch(training):
        scheduler, _ = trainer.create_scheduler_v2(
            training.optimizer, **trainer.scheduler_kwargs(training.args), updates_per_epoch=training.batches)
        loss = training.epoch(scheduler)
        training.history.append({})
        return loss

    return one_epoch
