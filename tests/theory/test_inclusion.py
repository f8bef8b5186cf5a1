import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from timm_selfconv import attention_maps
from timm_selfconv.layers import RELATIVE, TERMS
from timm_selfconv.theory import include
from tiny_nets import EVERY_KIND, noise, random_net

CONTENT = ('content', 'content_position')


def make_net(encoding='quadratic', terms=('position',), num_heads=3, seed=0, **kwargs):
    return random_net(encoding, terms, num_heads, seed, **kwargs)


def assert_same_function(net, other, x):
    with torch.no_grad():
        torch.testing.assert_close(net(x), other(x), rtol=0, atol=1e-10)


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
    projections = [data.draw(st.booleans()) for _ in range(2)]
    seed = data.draw(st.integers(0, 2 ** 16))
    net = make_net(*low, heads, seed, img_size=size, attn_proj=projections[0])
    target = make_net(*high, more, seed + 1, img_size=size, attn_proj=projections[1])
    for block in net.blocks if 'quadratic' in low[0] and 'position' in low[1] else ():
        block.attn.encoding.centers.data *= data.draw(st.sampled_from([1., 40.]))  # 40: far outside the grid
    state = {name: value.clone() for name, value in [*net.state_dict().items(), *target.state_dict().items()]}
    if holds(low, high):
        assert_same_function(include(net, target), net, noise(2, 3, *size))
    else:
        with pytest.raises(ValueError, match=r'is not in target=.*(cannot express|couples)'):
            include(net, target)
    assert all(torch.equal(state[k], v) for k, v in target.state_dict().items())


@pytest.mark.parametrize('name,target', [
    ('sa_quadratic_tiny_cifar', 'sa_quadratic_gen_cifar'), ('sa_learned_tiny_cifar', 'sa_learned_content_h16_cifar')])
def test_trained_nets_take_several_steps_at_once(name, target):
    net = timm.create_model(name, pretrained=True).eval().double()
    x = noise(1, 3, 32, 32)
    rich = include(net, target)
    assert rich.pretrained_cfg['architecture'] == target and not rich.training
    assert_same_function(rich, net, x)
    with torch.no_grad():
        for there, here in zip(attention_maps(rich, x), attention_maps(net, x)):
            torch.testing.assert_close(there[:, :9], here, rtol=0, atol=1e-12)


def test_errors_name_the_possible_steps():
    net = timm.create_model('sa_learned_tiny_cifar')
    with pytest.raises(ValueError, match=r'model=sa_learned_tiny_cifar \(learned: position; heads 9\) is not '
                                         r'in target=sa_quadratic_gen_cifar .*cannot express.*-> learned'):
        include(net, 'sa_quadratic_gen_cifar')
    with pytest.raises(ValueError, match='a full precision couples them'):
        include(make_net('quadratic_gen'), make_net('learned'))


def test_biases_that_a_net_lacks_are_zero():
    net, biased = (make_net('learned', CONTENT, qk_bias=bias) for bias in (False, True))
    assert_same_function(include(net, biased), net, noise(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r'it has no key\.bias'):
        include(biased, net)


def test_images_of_any_size_and_smaller_ones():
    size = 12, 20
    net = timm.create_model(
        'sa_quadratic_cifar', img_size=size, embed_dim=8, mlp_dim=8, depth=2, num_classes=7, in_chans=1, num_heads=4,
        norm_eps=1e-6, act_layer='silu', patch_size=4, dtype=torch.float64).eval()
    target = include(net, 'sa_learned_content_h16_cifar')
    for rows in (4, size[0]):
        assert_same_function(target, net, noise(2, 1, rows, size[1]))


def test_tables_for_larger_images_fit_smaller_ones():
    net, target = make_net('learned', img_size=(12, 16)), make_net('learned', CONTENT, img_size=(8, 16))
    assert_same_function(include(net, target), net, noise(2, 3, 8, 16))


def test_hierarchical_nets_that_know_positions_alone_are_in_plain_ones():
    shared = make_net('learned', hierarchical=True, depth=3)
    assert_same_function(include(shared, make_net('learned', CONTENT, depth=3)), shared, noise(2, 3, 8, 8))
    content = make_net('learned', CONTENT, hierarchical=True, depth=3)
    assert_same_function(include(shared, content), shared, noise(2, 3, 8, 8))
    with pytest.raises(ValueError, match='do not share their keys'):
        include(content, make_net('learned', CONTENT, depth=3))
    with pytest.raises(ValueError, match='share one block'):
        include(make_net('learned', depth=3), shared)


@pytest.mark.parametrize('encoding,terms', [
    ('quadratic_gen', ('position',)), ('learned', CONTENT), ('learned', TERMS)])
def test_everything_learns_after_two_steps(encoding, terms):
    """Every parameter gets gradients except the bias of the keys, which cancels in the softmax."""
    torch.manual_seed(0)
    net = include(make_net('quadratic'), make_net(encoding, terms, num_heads=4)).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    x, labels = noise(2, 3, 8, 8), torch.tensor([1, 2])
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        if not name.endswith('attn.key.bias'):
            assert (parameter.grad != 0).any(), name
        if name.endswith(('query.weight', 'key.weight', 'value.weight')):
            heads = parameter.grad.unflatten(1 if 'value' in name else 0, (4, -1)).abs()
            assert heads.movedim(1 if 'value' in name else 0, 0).flatten(1).amax(1).min() > 0, name


@pytest.mark.parametrize('kwargs,match', [
    (dict(num_heads=2), r'needs at least 3 heads in this layer, has 2'),
    (dict(depth=3), r'needs depth=2, has 3'),
    (dict(img_size=12), r'has 6 positions along an axis, but the encoding reaches 4: create the model with a larger'),
    (dict(terms=('content_position',), qk_bias=False), r'no bias to hold position scores'),
    (dict(embed_dim=8, num_heads=7, terms=CONTENT), r'scores of 7 heads do not fit in 4 channels of its tables'),
])
def test_nets_that_do_not_fit_are_named(kwargs, match):
    heads = kwargs.get('num_heads', 3)
    net = make_net('learned', num_heads=7 if heads == 7 else 3)
    with pytest.raises(ValueError, match=match):
        include(net, make_net('learned', **{'terms': ('content_position',), **kwargs}))


def test_an_activation_that_timm_cannot_name_needs_a_net_as_target():
    net, wanted = (make_net(encoding, act_layer='gelu_tanh') for encoding in ('quadratic', 'quadratic_gen'))
    with pytest.raises(ValueError, match=r"target='sa_quadratic_gen_cifar': cannot be made with .*gelutanh.*give a"):
        include(net, 'sa_quadratic_gen_cifar')
    assert_same_function(include(net, wanted), net, noise(2, 3, 8, 8))


def test_other_nets_are_refused():
    for name in ('no_such_net', 'resnet18_cifar', 'vit_tiny_patch16_224'):
        with pytest.raises(ValueError, match=f"target='{name}': needs a SelfAttentionNet, or the registered name of"):
            include(make_net(), name)
    resnet = timm.create_model('resnet18_cifar', device='meta')
    for model, target in ((resnet, make_net()), (make_net(), resnet)):
        with pytest.raises(ValueError, match='needs a SelfAttentionNet'):
            include(model, target)
