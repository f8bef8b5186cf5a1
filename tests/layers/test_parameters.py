import pytest
import timm
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm
from timm.optim import create_optimizer_v2

from lora import Lora
from timm_selfconv.layers import SelfAttention2d, no_weight_decay
from timm_selfconv.theory import attention_to_convs, convs_to_attention, fuse, include, prune_heads, truncate_values, \
    with_shifts
from tiny_nets import random_net

CHANGES = dict(
    adapted=Lora,
    subclassed=lambda layer: nn.modules.linear.NonDynamicallyQuantizableLinear(*layer.weight.shape[::-1]).double(),
    parametrized=weight_norm,
    hooked=lambda layer: layer.register_forward_hook(lambda module, args, out: 2 * out) and layer,
    hooked_before=lambda layer: layer.register_forward_pre_hook(lambda module, args: None) and layer,
    patched=lambda layer: setattr(layer, 'forward', lambda x: x) or layer,
    sparse=lambda layer: setattr(layer, 'weight', nn.Parameter(layer.weight.detach().to_sparse())) or layer,
)


def test_layers_that_compute_more_than_their_weights_are_named():
    for change, part in [(change, 'value') for change in CHANGES.values()] + [(Lora, 'proj')]:
        net = random_net()
        attn = net.blocks[1].attn
        setattr(attn, part, change(getattr(attn, part)))
        uses = [(include, random_net()), (prune_heads, {0: [1]}), (with_shifts, [[(0, (0, 0))], []]), (fuse,)]
        for use, *args in [*uses, (attention_to_convs,), *[(truncate_values, 2)] * (part == 'value')]:
            with pytest.raises(ValueError, match=rf'^blocks\.1\.attn\.{part}=\w+: needs.*merge_and_unload'):
                use(net, *args)


def test_hooks_that_a_richer_net_would_lose_are_named():
    for name in ('', 'stem', 'blocks.0', 'blocks.0.mlp.fc1'):
        net = random_net()
        net.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)
        with pytest.raises(ValueError, match=rf"^{name or 'model'}=\w+: needs a plain module"):
            include(net, random_net('quadratic_gen'))


def test_weight_decay_skips_centres_wherever_a_net_is_made():
    """In converted nets, nets for features and timm's nets with our layers, with timm's optimizer factory."""
    converted, _ = convs_to_attention(timm.create_model('resnet_tiny_cifar', channels=(8,) * 4))
    features = timm.create_model('sa_quadratic_tiny_cifar', features_only=True, embed_dim=8, mlp_dim=8, depth=3)
    zoo = timm.create_model('sa_quadratic_gen_cifar', embed_dim=8, mlp_dim=8, depth=1)
    for model in (converted, features, zoo):
        heads = no_weight_decay(model)
        assert heads and heads <= dict(model.named_parameters()).keys()
        groups = create_optimizer_v2(model, 'adamw', lr=0.1, weight_decay=0.05).param_groups
        decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
        names = {name for name, p in model.named_parameters() if id(p) in decayed}
        assert names and not {name for name in names if name.endswith(('centers', 'spreads'))}

    own = nn.Sequential(SelfAttention2d(8, 3), nn.Flatten())
    assert no_weight_decay(own) == {'0.encoding.centers', '0.encoding.spreads'}
