"""What a net learns from a teacher, against closed forms and timm's own nets."""
import pytest
import timm
import torch
import torch.nn.functional as F

from timm_selfconv.training.distillation import Student, logits_and_maps, map_loss


@pytest.fixture(scope='module')
def pair():
    torch.manual_seed(0)
    net = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=12, mlp_dim=8, depth=3).eval()
    return net, timm.create_model('resnet_tiny_cifar').eval()


@pytest.fixture
def maps():
    torch.manual_seed(0)
    return torch.randn(5, 3, 8, 8) * torch.tensor([0.1, 1., 10.]).view(3, 1, 1) + 4


def test_maps_that_know_all_lose_nothing_and_those_that_know_nothing_one(maps):
    deviation, mean = torch.std_mean(maps, (0, 2, 3), correction=0, keepdim=True)
    standard = (maps - mean) / deviation
    assert float(map_loss([standard], [maps])) == pytest.approx(0, abs=1e-5)
    assert float(map_loss([torch.zeros_like(maps)], [maps])) == pytest.approx(1, abs=1e-3)
    assert float(map_loss([standard + 0.5, 0 * maps], [maps, maps])) == pytest.approx((0.25 + 1) / 2, abs=1e-3)


def test_maps_of_two_grids_are_compared_on_the_coarser(maps):
    coarse = F.avg_pool2d(maps, 2)
    standard = F.batch_norm(coarse, None, None, training=True)
    for loss in (map_loss([F.interpolate(standard, scale_factor=2)], [coarse]), map_loss([standard], [maps])):
        assert float(loss) == pytest.approx(0, abs=1e-6)


def test_grids_that_are_no_multiples_of_each_other(maps):
    """Means over all pixels that a cell touches: an image of 24 pixels, and a teacher that sees 32."""
    touched = torch.zeros(6, 8)
    for cell in range(6):
        touched[cell, cell * 8 // 6:-((cell + 1) * 8 // -6)] = 1
    means = touched / touched.sum(1, keepdim=True)
    wanted = torch.einsum('ih,jw,bchw->bcij', means, means, maps)
    deviation, mean = torch.std_mean(wanted, (0, 2, 3), correction=0, keepdim=True)
    assert float(map_loss([(wanted - mean) / deviation], [maps])) == pytest.approx(0, abs=1e-5)


def test_a_student_gives_its_net_s_logits_and_maps_of_its_teacher_s_channels(pair):
    """In any order of layers, which may share a stage."""
    net, teacher = pair
    student, x = Student(net, teacher, {2: 4, 0: 2, 1: 4}), torch.randn(2, 3, 32, 32)
    every, (logits, maps) = net.forward_intermediates(x, intermediates_only=True), student(x)
    torch.testing.assert_close(logits, net(x))
    for head, m, ours in zip(student.heads, maps, (every[2], every[0], every[1]), strict=True):
        torch.testing.assert_close(m, F.conv2d(ours, head.weight, head.bias))
    _, wanted = logits_and_maps(teacher, x, student.stages)
    assert [w.shape[1] for w in wanted] == [128, 32, 128] and torch.equal(wanted[0], wanted[2])


def test_parameters_that_are_not_decayed_keep_so(pair):
    student = Student(*pair, {0: 2})
    assert student.no_weight_decay() == {f'net.{name}' for name in pair[0].no_weight_decay()} != set()
    assert Student(torch.nn.Identity(), None, {}).no_weight_decay() == set()


@pytest.mark.parametrize('pairs,message', [
    ({3: 2}, 'layer 3, counted from 0: the net has 3'),
    ({0: 5}, r'layer 5, counted from 0: its teacher \(kd_model_name\) has 5'),
])
def test_layers_that_are_not_there(pair, pairs, message):
    with pytest.raises(ValueError, match=message):
        Student(*pair, pairs)
    with pytest.raises(ValueError, match=r'its teacher .* has 0'):
        Student(pair[0], None, {0: 0})
