"""Distillation against closed forms and timm's models and loss."""
import pytest
import timm
import timm.task
import torch
import torch.nn.functional as F

from timm_selfconv.training.augment import at_size
from timm_selfconv.training.distillation import Distillation, Student, logits_and_maps, map_loss
from tiny_nets import SMALL


@pytest.fixture(scope='module')
def pair():
    torch.manual_seed(0)
    net = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=12, mlp_dim=8, depth=3).eval()
    return net, timm.create_model('resnet_tiny_cifar').eval()


@pytest.fixture
def maps():
    torch.manual_seed(0)
    return torch.randn(5, 3, 8, 8) * torch.tensor([0.1, 1., 10.]).view(3, 1, 1) + 4


def test_the_loss_is_zero_for_standardised_maps_and_one_for_zeros(maps):
    deviation, mean = torch.std_mean(maps, (0, 2, 3), correction=0, keepdim=True)
    standard = (maps - mean) / deviation
    assert float(map_loss([standard], [maps])) == pytest.approx(0, abs=1e-5)
    assert float(map_loss([torch.zeros_like(maps)], [maps])) == pytest.approx(1, abs=1e-3)
    assert float(map_loss([standard + 0.5, 0 * maps], [maps, maps])) == pytest.approx((0.25 + 1) / 2, abs=1e-3)


def test_maps_of_two_grids_are_compared_on_the_coarser(maps):
    """As means over all pixels that a cell touches, also for images of 24 pixels and a teacher on 32."""
    touched = torch.zeros(6, 8)
    for cell in range(6):
        touched[cell, cell * 8 // 6:-((cell + 1) * 8 // -6)] = 1
    means = touched / touched.sum(1, keepdim=True)
    for coarse in (F.avg_pool2d(maps, 2), torch.einsum('ih,jw,bchw->bcij', means, means, maps)):
        standard = F.batch_norm(coarse, None, None, training=True)
        assert float(map_loss([standard], [maps])) == pytest.approx(0, abs=1e-5)
    coarse = F.avg_pool2d(maps, 2)
    ours = F.interpolate(F.batch_norm(coarse, None, None, training=True), scale_factor=2)
    assert float(map_loss([ours], [coarse])) == pytest.approx(0, abs=1e-6)


def test_a_student_gives_its_net_s_logits_and_maps_of_its_teacher_s_channels(pair):
    """With layers in any order, which may share a stage. Weight decay skips the same parameters."""
    net, teacher = pair
    student, x = Student(net, teacher, {2: 4, 0: 2, 1: 4}), torch.randn(2, 3, 32, 32)
    every, (logits, maps) = net.forward_intermediates(x, intermediates_only=True), student(x)
    torch.testing.assert_close(logits, net(x))
    for head, m, ours in zip(student.heads, maps, (every[2], every[0], every[1]), strict=True):
        torch.testing.assert_close(m, F.conv2d(ours, head.weight, head.bias))
    _, wanted = logits_and_maps(teacher, x, student.stages)
    assert [w.shape[1] for w in wanted] == [128, 32, 128] and torch.equal(wanted[0], wanted[2])
    with torch.no_grad():
        torch.testing.assert_close(student(x), net(x))
    assert student.no_weight_decay() == {f'net.{name}' for name in net.no_weight_decay()} != set()
    assert Student(torch.nn.Identity(), None, {}).no_weight_decay() == set()


@pytest.mark.parametrize('more,message', [
    (['kd_model_name=sa_learned_content_hier_h16_cifar'], r'has no trained weights yet'),
    (['kd_maps={0: 1}'], r'kd_maps={0: 1}: layer 1: its teacher \(kd_model_name\) has 0'),
    (['kd_model_name=resnet_tiny_cifar', 'kd_maps={9: 1}'], r'kd_maps={9: 1}: layer 9: the net has \d+ layers'),
])
def test_missing_teachers_and_layers_are_named(tmp_path, refused, more, message):
    refused(message, tmp_path / 'run', *more)


@pytest.mark.parametrize('weights', [{}, dict(task_loss_weight=0.3)])
def test_distillation_equals_timm_s_train_py(training, one_epoch, weights):
    training = training('kd_model_name=resnet_tiny_cifar', 'kd_temperature=3', 'hardest_half={0: 16}', *(
        f'{k}={v}' for k, v in weights.items()), kind=Distillation)
    x = training.augment(training.images)
    task = timm.task.LogitDistillationTask(
        training.model, timm.create_model('resnet_tiny_cifar', pretrained=True),
        torch.nn.CrossEntropyLoss(label_smoothing=training.args.smoothing), temperature=3., **weights)
    wanted = task(x, training.labels)['loss']
    torch.testing.assert_close(training.loss(x, training.labels, None), wanted)
    seen = []
    training.teacher.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    before = {k: v.clone() for k, v in training.teacher.state_dict().items()}
    training.args.img_sizes = {0: 16}
    one_epoch(training)
    assert {x.shape[-1] for x in seen} == {32}  # the same crop at full size, at any size of the net's images
    torch.testing.assert_close(training.teacher.state_dict(), before, rtol=0, atol=0)


def test_maps_of_the_teacher_s_stages_are_learned_too(training, one_epoch):
    teacher = ['kd_model_name=resnet_tiny_cifar', 'img_sizes={0: 24}']
    plain, training = (training(*teacher, *more, kind=Distillation) for more in (
        [], ['kd_maps={1: 3}', 'kd_maps_weight=2.5']))
    x = training.augment(training.images)
    with torch.no_grad():
        ours = training.model.forward_intermediates(at_size(x, 24), indices=[1], intermediates_only=True)[0]
        theirs = training.teacher.model.forward_intermediates(x, indices=[3], intermediates_only=True)[0]
        theirs = torch.nn.BatchNorm2d(64, affine=False)(F.adaptive_avg_pool2d(theirs, 6))  # 8 x 8, for 6 x 6 patches
        maps = (training.student.heads[0](ours) - theirs).square().mean()
    without = plain.loss(x, training.labels, 24)
    torch.testing.assert_close(training.loss(x, training.labels, 24), without + 2.5 * maps)
    before = training.student.heads[0].weight.clone()
    one_epoch(training)
    assert not torch.equal(training.student.heads[0].weight, before)
    assert training.checkpoint()['state_dict'].keys() == training.model.state_dict().keys()


def test_a_net_that_learns_maps_goes_on_with_its_linear_layers(tmp_path, run):
    more = ['epochs=2', 'opt=muon', 'kd_model_name=resnet_tiny_cifar', 'kd_maps={0: 2, 1: 4}', SMALL]
    run(tmp_path / 'killed', *more, until=0)
    killed, whole = (run(tmp_path / output, *more) for output in ('killed', 'whole'))
    for key in ('state_dict', 'kd_heads'):
        torch.testing.assert_close(killed[key], whole[key], rtol=0, atol=0)
    torch.testing.assert_close(killed['optimizer']['state'], whole['optimizer']['state'], rtol=0, atol=0)
