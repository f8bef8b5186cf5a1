"""Parameter groups: position encodings apart, everything once, rates that timm's schedulers keep apart."""
import pytest
import timm

from timm_selfconv.training.optimization import position_groups

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)


@pytest.mark.parametrize('name,positions', [
    ('sa_quadratic_cifar', ('centers', 'spreads')), ('sa_quadratic_gen_cifar', ('centers', 'spreads')),
    ('sa_learned_content_cifar', ('row_table', 'col_table')),
    ('sa_learned_cifar', ('row_table', 'col_table', 'row_keys', 'col_keys')), ('resvit_cifar', ()),
    ('resnet_tiny_cifar', ('centers', 'spreads'))])
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name, positions):
    net = timm.create_model(name, **(SMALL if name != 'resnet_tiny_cifar' else dict(attention_stages=['layer4'])))
    groups = position_groups(net, 0.05, 30.)
    found = {id(p): group for group in groups for p in group['params']}
    assert sum(len(group['params']) for group in groups) == len(found) == len(list(net.parameters()))
    for parameter_name, parameter in net.named_parameters():
        group = found[id(parameter)]
        assert group['lr_scale'] == (30. if parameter_name.split('.')[-1] in positions else 1.)
        exempt = parameter.ndim <= 1 or parameter_name.endswith(('.centers', '.spreads', 'pos_embed'))
        assert group['weight_decay'] == (0. if exempt else 0.05)
