import copy
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from timm_selfconv.layers import RELATIVE, TERMS
from timm_selfconv.theory import include
from tiny_nets import EVERY_KIND, noise, random_net

CONTENT = ('content', 'content_position')


def assert_same_function(net, other, *size):
    torch.testing.assert_close(net(noise(*size)), other(noise(*size)), rtol=0, atol=1e-10)


def holds(low, high):
    """Return True if one kind of attention can express another, by equation (8)."""
    (encoding, terms), (rich, more) = low, high
    if low == high:
        return True
    if encoding not in RELATIVE or rich not in RELATIVE:
        return False
    if terms == more and not {'position', 'content_position'} & set(terms):
        return True  # no term uses the encoding
    if terms != ('position',):
        return False
    if 'position' in more:
        return rich == encoding or (encoding, rich) in {('quadratic', 'quadratic_gen'), ('quadratic', 'learned')}
    return rich == 'learned' and encoding != 'quadratic_gen' and 'content_position' in more


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_logits_stay_the_same_or_the_error_says_why(data):
    low, high = data.draw(st.sampled_from(EVERY_KIND[:1] + EVERY_KIND)), data.draw(st.sampled_from(EVERY_KIND))
    if data.draw(st.booleans()):  # otherwise the target cannot express most models
        low = data.draw(st.sampled_from([kind for kind in EVERY_KIND if holds(kind, high)]))
    heads = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    more = [min(n + data.draw(st.integers(0, 2)), 4) for n in heads]
    size = [2 * n for n in data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2))]
    seed, own_proj, proj = data.draw(st.integers(0, 2 ** 16)), data.draw(st.booleans()), data.draw(st.booleans())
    net = random_net(*low, heads, seed, img_size=size, attn_proj=own_proj)
    target = random_net(*high, more, seed + 1, img_size=size, attn_proj=proj)
    for block in net.blocks if 'quadratic' in low[0] and 'position' in low[1] else ():
        block.attn.encoding.centers.data *= data.draw(st.sampled_from([1., 40.]))  # 40: far outside the grid
    before = copy.deepcopy([net.state_dict(), target.state_dict()])
    if holds(low, high):
        assert_same_function(include(net, target), net, 2, 3, *size)
    else:
        with pytest.raises(ValueError, match=r'is not in target=.*(cannot express|couples)'):
            include(net, target)
    torch.testing.assert_close([net.state_dict(), target.state_dict()], before, rtol=0, atol=0)


def test_targets_by_name_have_the_sizes_of_the_net():
    net = timm.create_model(
        'sa_quadratic_cifar', img_size=(12, 20), embed_dim=8, mlp_dim=8, depth=2, num_classes=7, in_chans=1,
        num_heads=4, norm_eps=1e-6, act_layer='silu', patch_size=4, dtype=torch.float64).eval()
    target = include(net, 'sa_learned_content_h16_cifar')
    assert target.pretrained_cfg['architecture'] == 'sa_learned_content_h16_cifar' and not target.training
    for rows in (4, 12):
        assert_same_function(target, net, 2, 1, rows, 20)


def test_biases_and_larger_tables():
    """New biases are zero, and tables for larger images fit smaller ones."""
    net, biased = (random_net('learned', CONTENT, qk_bias=bias) for bias in (False, True))
    assert_same_function(include(net, biased), net, 2, 3, 8, 8)
    with pytest.raises(ValueError, match=r'it has no key\.bias'):
        include(biased, net)
    net, target = random_net('learned', img_size=(12, 16)), random_net('learned', CONTENT, img_size=(8, 16))
    assert_same_function(include(net, target), net, 2, 3, 8, 16)


def test_hierarchical_nets_that_know_positions_alone_are_in_plain_ones():
    shared, content = (random_net('learned', terms, hierarchical=True, depth=3) for terms in (('position',), CONTENT))
    for target in (random_net('learned', CONTENT, depth=3), content):
        assert_same_function(include(shared, target), shared, 2, 3, 8, 8)
    with pytest.raises(ValueError, match='do not share their keys'):
        include(content, random_net('learned', CONTENT, depth=3))
    with pytest.raises(ValueError, match='share one block'):
        include(random_net('learned', depth=3), shared)


@pytest.mark.parametrize('encoding,terms', [
    ('quadratic_gen', ('position',)), ('learned', CONTENT), ('learned', TERMS)])
def test_everything_learns_after_two_steps(encoding, terms):
    """Every parameter and head gets gradients, except the keys' bias, which softmax cancels."""
    torch.manual_seed(0)
    net = include(random_net('quadratic', num_heads=3), random_net(encoding, terms)).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(noise(2, 3, 8, 8)), torch.tensor([1, 2])).backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        heads, dim = (4, 1) if name.endswith('value.weight') else (4, 0) if name.endswith('query.weight') else (1, 0)
        if not name.endswith('attn.key.bias'):
            assert parameter.grad.unflatten(dim, (heads, -1)).movedim(dim, 0).flatten(1).abs().amax(1).min() > 0, name


learned = partial(random_net, 'learned', num_heads=3)
TINY, RESNET = timm.create_model('sa_learned_tiny_cifar'), timm.create_model('resnet18_cifar', device='meta')


@pytest.mark.parametrize('net,target,match', [
    (learned(), learned(num_heads=2), r'needs at least 3 heads in this layer, has 2'),
    (learned(), learned(depth=3), r'needs depth=2, has 3'),
    (learned(), learned(terms=CONTENT, img_size=12),
     r'has 6 positions along an axis, but the encoding reaches 4: create the model with a larger'),
    (learned(), learned(img_size=12), 'its tables are for another grid'),
    (learned(), learned(terms=CONTENT, qk_bias=False), r'no bias to hold position scores'),
    (learned(num_heads=7), learned(terms=CONTENT, num_heads=7),
     r'scores of 7 heads do not fit in 4 channels of its tables'),
    (random_net('quadratic_gen'), random_net('learned'), 'a full precision couples them'),
    (TINY, 'sa_quadratic_gen_cifar', r'model=sa_learned_tiny_cifar \(learned: position; heads 9\) is not '
                                     r'in target=sa_quadratic_gen_cifar .*cannot express.*-> learned'),
    *((TINY, name, f"target='{name}': needs a SelfAttentionNet, or the registered name of")
      for name in ('no_such_net', 'resnet18_cifar')),
    (RESNET, TINY, 'needs a SelfAttentionNet'),
    (TINY, RESNET, 'needs a SelfAttentionNet'),
    (random_net(act_layer='gelu_tanh'), 'sa_quadratic_gen_cifar',
     r"target='sa_quadratic_gen_cifar': cannot be made with .*gelutanh.*give a"),
], ids=lambda v: v if isinstance(v, str) else None)
def test_nets_that_do_not_fit_are_named(net, target, match):
    with pytest.raises(ValueError, match=match):
        include(net, target)
