"""Tests of every family."""
import pytest
import timm
import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.measure.counting import count
from tiny_nets import FAMILIES, SHALLOW, explicit_maps, noise, shallow_net

AROUND, LAYER = 23 * 256 + 10, 17 * 256 ** 2 + 2 * 256 + 2 * 512 * 256 + 512 + 256 + 4 * 256  # 16 heads, without scores
# published sizes, to the digit
PARAMETERS = {
    'resnet18_cifar': 11_173_962,
    'sa_quadratic_cifar': 12_086_844,
    'sa_quadratic_gen_cifar': 12_087_006,
    'sa_quadratic_gen_pruned_cifar': 9_686_916,
    'sa_learned_cifar': 12_278_682,
    'sa_learned_content_cifar': 29_484_282,
    'sa_learned_content_hier_cifar': 4_754_122,
    # 16 heads of 256 channels: positions take 3 a head, or two tables of 31 x 256 and 2 x 256 a head
    'sa_quadratic_h16_cifar': AROUND + 6 * (LAYER + 16 * 3),
    'sa_learned_h16_cifar': AROUND + 6 * (LAYER + 2 * (31 + 16) * 256),
    'sa_learned_content_h16_cifar': AROUND + 6 * (LAYER + 31 * 256 + 2 * 16 * 256 * 257),
    'sa_learned_content_hier_h16_cifar': AROUND + LAYER + 31 * 256 + 2 * 16 * 256 ** 2 - 256 * 257,
    'san_pairwise_cifar': 3_737_056,
    'san_patchwise_cifar': 3_851_142,
    'san_pairwise_hier_cifar': 352_750,
    'san_patchwise_hier_cifar': 356_282,
    'resvit_cifar': 37_394_506,
    'resvit_hier_cifar': 6_531_946,
}


def test_published_parameters_to_the_digit():
    nets = {name: timm.create_model(name, device='meta') for name in PARAMETERS}
    assert {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()} == PARAMETERS


def test_the_tiny_resnet_is_as_large_as_the_tiny_attention_net():
    """In parameters, and in FLOPs by the paper's convention."""
    ours, theirs = (count(timm.create_model(f'{name}_tiny_cifar')) for name in ('resnet', 'sa_quadratic'))
    assert ours.parameters == pytest.approx(theirs.parameters, rel=0.001)
    assert ours.linear_conv_flops == pytest.approx(theirs.linear_conv_flops, rel=0.013)


@pytest.mark.parametrize('name', FAMILIES)
def test_no_images_and_flops_without_gradients(name):
    """No images give no logits. Flops are counted alike with and without gradients."""
    model, flops = timm.create_model(name, **SHALLOW[name]), []
    assert model.train()(torch.randn(0, 3, 32, 32)).shape == model.eval()(torch.randn(0, 3, 32, 32)).shape == (0, 10)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 3, 32, 32))
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


@pytest.mark.filterwarnings('ignore')  # torchao will replace it
@pytest.mark.parametrize('name', [
    'sa_learned_content_hier_cifar', 'resvit_hier_cifar', pytest.param('san_patchwise_cifar', marks=pytest.mark.slow)])
def test_plain_symbolic_trace_and_quantization_by_fx(name):
    """Integers of 8 bits change the logits by a fraction of their norm, and by most of it if they saturate."""
    model, x = shallow_net(name).float(), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), logits)
        prepared = prepare_fx(model, get_default_qconfig_mapping('x86'), (x,))
        torch.testing.assert_close(prepared(x), logits)
        change = convert_fx(prepared)(x) - logits
    assert 0 < change.norm() < 0.2 * logits.norm()


@pytest.mark.parametrize('name', FAMILIES[::2])
def test_weights_of_8_bits_by_torchao(name):
    quantization = pytest.importorskip('torchao.quantization', reason='torchao is not installed')
    model, x = shallow_net(name).float(), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        logits = model(x)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        change = model(x) - logits
    assert 0 < change.norm() < 0.05 * logits.norm()


@pytest.mark.parametrize('name', FAMILIES)
def test_functional_transforms(name):
    """Gradients per image by vmap, and derivatives in a direction by forward mode, equal plain gradients."""
    with explicit_maps():  # torch's fused attention has no forward mode
        model = shallow_net(name, img_size=16)
    x, parameters = noise(2, 3, 16, 16), dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    whole = torch.func.grad(loss)(parameters, x)
    torch.testing.assert_close({name: g.sum(0) for name, g in each.items()}, whole)

    direction, gradient = noise(2, 3, 16, 16, seed=2), torch.func.grad(lambda x: loss(parameters, x))
    _, slope = torch.func.jvp(lambda x: loss(parameters, x), (x,), (direction,))
    torch.testing.assert_close(slope, (gradient(x) * direction).sum())
    _, curvature = torch.func.jvp(gradient, (x,), (direction,))  # forward over reverse, then reverse over reverse
    twice = torch.func.grad(lambda x: (gradient(x) * direction).sum())(x)
    torch.testing.assert_close(curvature, twice)


@pytest.mark.parametrize('name,feature_cls', [
    ('sa_learned_content_hier_cifar', 'hook'), ('resvit_cifar', 'fx'), ('san_pairwise_hier_cifar', 'list')])
def test_other_ways_to_take_features_are_refused(name, feature_cls):
    """Hooks run once for a shared module, and never for a stage that is not called as one module."""
    with pytest.raises(ValueError, match=f"feature_cls='{feature_cls}': {name} needs 'getter'"):
        timm.create_model(name, features_only=True, feature_cls=feature_cls, **SHALLOW[name])
    with pytest.raises(TypeError, match='out_indices'):  # without features_only
        timm.create_model(name, out_indices=(0,), **SHALLOW[name])
