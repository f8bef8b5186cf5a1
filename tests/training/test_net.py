"""The net of a recipe, for the classes of its data."""
from types import SimpleNamespace

import pytest
import timm
import torch

from pictures import fill_splits
from timm_selfconv.data import class_names, open_dataset
from timm_selfconv.models import CIFAR10_CLASSES
from timm_selfconv.training.net import create_net
from timm_selfconv.training.recipes import read_recipe
from tiny_nets import SMALL


def test_classes_are_the_net_s_by_name(tmp_path, own, refused):
    known = fill_splits(tmp_path / 'data', 'truck', 'cat')
    train_set, test_set = (open_dataset(str(known), name, None, 'img', 'label') for name in ('train', 'test'))
    create_net(read_recipe('muon_tiny', [SMALL]), train_set, test_set)
    assert [label for _, label in test_set] == [3] * 3 + [9] * 3 and train_set[0][1] == 3
    for more, message in ((SMALL, r"dataset's are \['ant', 'cow'\], the model's .* key num_classes=2"),
                          ('num_classes=3', r"num_classes=3: the training images have 2, \('ant', 'cow'\)")):
        refused(message, tmp_path / 'run', more, data=own)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name,count', [('resnet_tiny_cifar', 2), ('sa_quadratic_tiny_cifar', 10)])
def test_other_classes_get_a_new_classifier(name, count):
    """Behind the weights that the net has, even if there are as many of them."""
    names = [f'class {i}' for i in range(count)]
    dataset = SimpleNamespace(class_to_idx={name: i for i, name in enumerate(names)})
    keys = [f'model={name}', 'pretrained=true', f'num_classes={count}']
    ours = create_net(read_recipe('muon_tiny', keys), dataset)
    trained = timm.create_model(name, pretrained=True)
    states = ours.state_dict(), trained.state_dict()
    assert all(torch.equal(states[0][k], v) == ('fc.' not in k) for k, v in states[1].items())
    assert class_names(ours, count) == tuple(names) and ours(torch.zeros(1, 3, 32, 32)).shape == (1, count)
    dataset.class_to_idx = dict(zip(CIFAR10_CLASSES, range(10)))
    kept = create_net(read_recipe('muon_tiny', [*keys[:2], 'num_classes=10']), dataset).state_dict()
    torch.testing.assert_close(kept, trained.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('recompute', ['true', 'false'])
def test_recipes_say_whether_stages_are_recomputed(recompute):
    """grad_checkpointing, timm's key, which the nets themselves leave off."""
    net = create_net(read_recipe('report_san_hier', [f'grad_checkpointing={recompute}']))
    assert net.grad_checkpointing == (recompute == 'true')
