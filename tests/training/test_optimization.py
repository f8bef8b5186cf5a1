"""Parameter groups: positions and content apart, everything once, rates that timm keeps apart. Muon's precision."""
import pytest
import timm
import torch
from timm.optim import Muon

from timm_selfconv.training.optimization import muon_in_float32, scaled_groups

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)


@pytest.mark.parametrize('name,positions', [
    ('sa_quadratic_cifar', ('centers', 'spreads')), ('sa_quadratic_gen_cifar', ('centers', 'spreads')),
    ('sa_learned_content_cifar', ('row_table', 'col_table', 'query.bias')),
    ('sa_learned_cifar', ('row_table', 'col_table', 'row_keys', 'col_keys')), ('resvit_cifar', ()),
    ('resnet_tiny_cifar', ('centers', 'spreads'))])
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name, positions):
    net = timm.create_model(name, **(SMALL if name != 'resnet_tiny_cifar' else dict(attention_stages=['layer4'])))
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


def muon_step(gradient):
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    Muon([weight], lr=1., adjust_lr_fn=None, ns_coefficients=(3.4445, -4.7750, 2.0315)).step()
    return weight.detach()


def test_muon_takes_a_polynomial_of_the_singular_values_to_the_context_s_precision(images):
    """Five times 3.4445 s - 4.775 s^3 + 2.0315 s^5, by a decomposition in float64."""
    gradient = images(8, 24)
    u, s, v = torch.linalg.svd(gradient.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    expected = -(u * s) @ v
    with muon_in_float32():
        exact = muon_step(gradient)
    torch.testing.assert_close(exact.double(), expected, rtol=0, atol=1e-4)
    assert (muon_step(gradient) - expected).abs().max() > 1e-3
