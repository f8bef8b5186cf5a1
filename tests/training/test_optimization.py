"""Parameter groups: position encodings apart, everything once, rates that timm's schedulers keep apart."""
import pytest
import timm
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from timm_selfconv.training.optimization import position_groups

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)


@pytest.mark.parametrize('name,positions', [
    ('sa_quadratic_cifar', ('centers', 'spreads')), ('sa_quadratic_gen_cifar', ('centers', 'spreads')),
    ('sa_learned_content_cifar', ('row_table', 'col_table')),
    ('sa_learned_cifar', ('row_table', 'col_table', 'row_keys', 'col_keys')), ('resvit_cifar', ()),
    ('resnet_tiny_cifar', ('centers', 'spreads'))])
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name, positions):
    net = timm.create_model(name, **(SMALL if name != 'resnet_tiny_cifar' else dict(attention_stages=['layer4'])))
    groups, exempt = position_groups(net, 0.05, 30.), net.no_weight_decay()
    found = {id(p): group for group in groups for p in group['params']}
    assert sum(len(group['params']) for group in groups) == len(found) == len(list(net.parameters()))
    for parameter_name, parameter in net.named_parameters():
        group = found[id(parameter)]
        assert group['lr_scale'] == (30. if parameter_name.split('.')[-1] in positions else 1.)
        assert group['weight_decay'] == (0. if parameter.ndim <= 1 or parameter_name in exempt else 0.05)


def test_schedulers_keep_the_ratio_of_the_rates():
    optimizer = create_optimizer_v2(
        timm.create_model('sa_quadratic_cifar', **SMALL), 'muon', lr=0.01, weight_decay=0.05,
        param_group_fn=lambda net: position_groups(net, 0.05, 30.))
    scheduler, _ = create_scheduler_v2(
        optimizer, 'poly', num_epochs=10, warmup_epochs=1, decay_rate=1., min_lr=0., step_on_epochs=False,
        updates_per_epoch=10)
    for update, wanted in ((5, 0.005), (50, 0.005), (75, 0.0025)):  # on its way up, half way down, three quarters
        scheduler.step_update(update)
        for group in optimizer.param_groups:
            assert group['lr'] == pytest.approx(wanted * group['lr_scale'], rel=0.02)
