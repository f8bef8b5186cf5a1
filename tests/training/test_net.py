"""The model of a recipe: classes, whitened stem, parameter groups, precision of Muon."""
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import Muon

from pictures import fill, fill_splits
from timm_selfconv.data import class_names, open_dataset
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.models import CIFAR10_CLASSES
from timm_selfconv.theory import convs_to_attention
from timm_selfconv.training.net import create_net, muon_in_float32, scaled_groups, whiten_stem
from timm_selfconv.training.recipes import read_recipe
from tiny_nets import NARROW, SMALL


def test_classes_are_the_net_s_by_name(tmp_path, own, refused):
    known = fill_splits(tmp_path / 'data', 'truck', 'cat')
    train_set, test_set = (open_dataset(str(known), name) for name in ('train', 'test'))
    create_net(read_recipe('muon_tiny', [SMALL]), train_set, test_set)
    assert [label for _, label in test_set] == [3] * 3 + [9] * 3 and train_set[0][1] == 3
    for more, message in ((SMALL, r"dataset has \['ant', 'cow'\], the model has .* key num_classes=2"),
                          ('num_classes=3', r"num_classes=3: the training images have 2 classes, \('ant', 'cow'\)")):
        refused(message, tmp_path / 'run', more, data=own)
    refused("'test': needs other images than train_split='train'", tmp_path / 'run', SMALL, data=known / 'train')
    fill(fill_splits(tmp_path / 'numbers', 0, 1) / 'test', [5])
    refused("val_split='test': labels from 0 to 5 do not fit a net with 2 classes", tmp_path / 'run',
            f'{SMALL[:-1]}, "num_classes": 2}}', data=tmp_path / 'numbers')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name,count', [('resnet_tiny_cifar', 2), ('sa_quadratic_tiny_cifar', 10)])
def test_other_classes_get_a_new_classifier(name, count):
    """Even if the number of classes is the same."""
    names = [f'class {i}' for i in range(count)]
    dataset = SimpleNamespace(reader=SimpleNamespace(class_to_idx={name: i for i, name in enumerate(names)}))
    keys = [f'model={name}', 'pretrained=true', f'num_classes={count}']
    ours = create_net(read_recipe('muon_tiny', keys), dataset)
    state, trained = ours.state_dict(), timm.create_model(name, pretrained=True).state_dict()
    assert all(torch.equal(state[k], v) == ('fc.' not in k) for k, v in trained.items())
    assert class_names(ours, count) == tuple(names) and ours(torch.zeros(1, 3, 32, 32)).shape == (1, count)
    dataset.reader.class_to_idx = dict(zip(CIFAR10_CLASSES, range(10)))
    kept = create_net(read_recipe('muon_tiny', [*keys[:2], 'num_classes=10']), dataset).state_dict()
    torch.testing.assert_close(kept, trained, rtol=0, atol=0)


def correlated_images():
    """Make images with correlated channels and neighbours and a nonzero mean."""
    noise = torch.randn(200, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    mixed = torch.einsum('dc,bcij->bdij', torch.tensor([[1., 0.8, 0.5], [0., 1., 0.9], [0., 0., 2.]]), noise)
    return F.avg_pool2d(mixed, 2, 1) + 0.7


@pytest.mark.parametrize('conv', [nn.Conv2d(3, 7, 2, 2), nn.Conv2d(3, 40, 3, 1, 1)])
def test_channels_are_white_and_of_the_scale(conv):
    """For n components and D channels: covariance ``scale^2 D / n`` on n dimensions, or the unit matrix."""
    torch.manual_seed(0)
    images = correlated_images()
    whiten_stem(conv.double(), images, 0.5, eps=0.)
    out = conv(images.double()).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), torch.zeros(len(out), dtype=torch.double), rtol=0, atol=1e-10)
    components = min(len(out), conv.weight[0].numel())
    variances = torch.linalg.eigvalsh(out.cov()).flip(0)
    wanted = torch.zeros(len(out), dtype=torch.double)
    wanted[:components] = 0.25 * len(out) / components
    torch.testing.assert_close(variances, wanted, rtol=1e-5, atol=1e-6)  # the mixing matrix is float32
    assert out.square().mean() == pytest.approx(0.25, rel=2e-3)  # of finitely many patches


def test_directions_without_variance_stay_finite_and_groups_are_refused():
    images, conv = correlated_images(), nn.Conv2d(3, 16, 2, 2)
    whiten_stem(conv, images[:, :1].expand(-1, 3, -1, -1), 1.)  # in grey images two of three channels are redundant
    assert conv.weight.isfinite().all() and conv.weight.abs().max() < 5e-4 ** -0.5 * 2
    with pytest.raises(ValueError, match='groups=3: whitening needs'):
        whiten_stem(nn.Conv2d(3, 3, 2, groups=3), images, 1.)


@pytest.mark.parametrize('name,positions', [
    ('sa_quadratic_gen_cifar', ('centers', 'spreads')),
    ('sa_learned_content_cifar', ('row_table', 'col_table', 'query.bias')),
    ('sa_learned_cifar', ('row_table', 'col_table', 'row_keys', 'col_keys')), ('resvit_cifar', ()),
    ('converted', ('centers', 'spreads')), ('of another package', ('centers', 'spreads'))])
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name, positions):
    """timm asks a model for the names without decay, but models of other packages do not know them."""
    if name == 'converted':
        net, _ = convs_to_attention(timm.create_model('resnet_tiny_cifar'), 'layer4')
    elif name == 'of another package':
        net = nn.Sequential(nn.Linear(8, 8), SelfAttention2d(8, num_heads=2, grid_size=(4, 4)))
    else:
        net = timm.create_model(name, **NARROW)
    groups = scaled_groups(net, 0.05, 30., 0.1)
    found = {id(p): group for group in groups for p in group['params']}
    assert sum(len(group['params']) for group in groups) == len(found) == len(list(net.parameters()))
    for parameter_name, parameter in net.named_parameters():
        group = found[id(parameter)]
        content = name.startswith('sa_') and parameter_name.endswith(('.query.weight', '.key.weight'))
        scale = 30. if positions and parameter_name.endswith(positions) else 0.1 if content else 1.
        assert group['lr_scale'] == scale
        exempt = parameter.ndim <= 1 or parameter_name.endswith(('.centers', '.spreads', 'pos_embed'))
        assert group['weight_decay'] == (0. if exempt else 0.05)


def test_muon_takes_a_polynomial_of_the_singular_values_to_the_context_s_precision(images):
    """Five times 3.4445 s - 4.775 s^3 + 2.0315 s^5, computed with singular values in float64."""
    gradient = images(8, 24)
    u, s, v = torch.linalg.svd((gradient / gradient.norm()).double(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    errors = []
    for precision in (muon_in_float32(), nullcontext()):
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        with precision:
            Muon([weight], lr=1., adjust_lr_fn=None, ns_coefficients=(3.4445, -4.7750, 2.0315)).step()
        errors.append((weight + (u * s) @ v).abs().max())
    assert errors[0] < 1e-4 and errors[1] > 1e-3
