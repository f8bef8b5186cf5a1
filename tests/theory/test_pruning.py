import copy

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from timm.models import reparameterize_model

from lora import Lora
from timm_selfconv.theory import (
    condition_numbers, degenerate_heads, fuse, precision_eigenvalues, prune_heads, truncate_values)
from tiny_nets import EVERY_KIND, noise, random_net

KINDS = [
    *((dict(encoding=encoding, terms=terms), {0: [2], 1: [3, 0]}, (3, 2)) for encoding, terms in EVERY_KIND),
    *((dict(encoding='learned', terms=terms, hierarchical=True, qk_bias=False, attn_proj=False, depth=3), {0: [0, 2]},
       (2,)) for terms in (('position',), ('content', 'content_position')))]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(KINDS))
def test_a_pruned_net_is_the_full_net_with_values_at_zero(kind):
    kwargs, dropped, left = kind
    net = random_net(**kwargs)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    pruned = prune_heads(net, dropped)
    assert pruned.num_heads == left and pruned.depth == net.depth
    torch.testing.assert_close(dict(net.state_dict()), state, rtol=0, atol=0)
    shapes = [[p.shape for p in each.parameters()] for each in (pruned, random_net(num_heads=left, **kwargs))]
    assert shapes[0] == shapes[1]
    with torch.no_grad():
        for layer, heads in dropped.items():
            net.blocks[layer].attn.value.weight.view(8, 4, 8)[:, heads] = 0.
        torch.testing.assert_close(pruned(noise(2, 3, 8, 8)), net(noise(2, 3, 8, 8)), rtol=1e-12, atol=1e-12)


def test_the_paper_s_pruned_net():
    """Its parameters are counted in tests/models/test_families.py."""
    full = timm.create_model('sa_quadratic_gen_cifar', device='meta')
    pruned = prune_heads(full, {0: [0, 1], 1: [0, 2, 4, 6], 2: [8], 3: [1, 3], 4: [0, 1, 2, 3, 4, 5]})
    shapes = timm.create_model('sa_quadratic_gen_pruned_cifar', device='meta').state_dict()
    assert {k: v.shape for k, v in pruned.state_dict().items()} == {k: v.shape for k, v in shapes.items()}


def test_degenerate_heads_follow_appendix_e():
    net = random_net('quadratic_gen', num_heads=(5, 2))
    rotation = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    eigenvalues = [(1., 2.), (5e-6, 9e-6), (1e-5, 2.), (1e-5, 0.9), (0., 0.)], [(1e-5, 2e-5), (0., 1.)]
    for layer, pairs in enumerate(torch.tensor(pairs).double() for pairs in eigenvalues):
        net.blocks[layer].attn.encoding.spreads.data = rotation * pairs.sqrt()[:, None]
        torch.testing.assert_close(precision_eigenvalues(net)[layer], pairs, rtol=1e-5, atol=1e-16)
    singular = torch.tensor([[-1e-9, 1.], [0., 0.], [0., 1.], [1., 2.]])  # and rounded below 0
    assert condition_numbers(singular).tolist() == [torch.inf, torch.inf, torch.inf, 2.]
    assert degenerate_heads(net) == {0: [1, 2, 4], 1: [1]}
    assert degenerate_heads(net, max_condition=1e3) == {0: [1, 2, 3, 4], 1: [1]}
    assert degenerate_heads(net, min_eigenvalue=1e-4) == {0: [1, 2, 4], 1: [0, 1]}
    assert degenerate_heads(prune_heads(net, degenerate_heads(net))) == {}
    # S = [[1, 1], [1, 1 + 2^-10]] has condition number 1.7e7; its precision rounded to half is singular
    for small, dtype in ((2 ** -13, torch.float32), (2 ** -10, torch.float16)):
        root = torch.tensor([[1., 1.], [1., 1. + small]]).double()
        net.blocks[0].attn.encoding.spreads.data[1] = root
        expected = torch.linalg.svdvals(root).flip(0).square()
        torch.testing.assert_close(precision_eigenvalues(net.to(dtype))[0][1], expected, rtol=1e-6, atol=0)
    isotropic = random_net('quadratic')
    isotropic.blocks[1].attn.encoding.spreads.data = torch.tensor([1., 1e-3, -1e-3, -2.])
    assert degenerate_heads(isotropic) == {1: [1, 2]}


def test_mode_dtype_and_frozen_parameters_stay():
    net = timm.create_model('sa_learned_content_tiny_cifar', embed_dim=8, mlp_dim=8, depth=3, dtype=torch.bfloat16)
    net.blocks[2].attn.value.weight.requires_grad_(False)
    pruned = prune_heads(net.train(), {2: [1]})
    assert pruned.training and {p.dtype for p in pruned.parameters()} == {torch.bfloat16}
    assert [n for n, p in pruned.named_parameters() if not p.requires_grad] == ['blocks.2.attn.value.weight']


@pytest.mark.parametrize('heads,match', [
    ({2: [0]}, r'heads=\{2: \[0\]\}: there is no layer 2, layers are 0 to 1'),
    ({0: 1}, r'heads=\{0: 1\}: needs a dictionary of heads by layer'),
    *(({1: heads}, 'layer 1 needs heads from 0 to 3, each once, not all') for heads in ([4], [1, 1], [0, 3, 2, 1])),
])
def test_heads_that_cannot_be_pruned_are_named(heads, match):
    with pytest.raises(ValueError, match=match):
        prune_heads(random_net(), heads)


def test_nets_without_heads_to_prune_are_refused():
    for kind in ('learned', ('position',)), ('quadratic', ('content_position',)):
        with pytest.raises(ValueError, match='heads of layer 0 have no precision'):
            degenerate_heads(random_net(*kind))
    with pytest.raises(ValueError, match='model=ResNetCifar: needs a SelfAttentionNet'):
        prune_heads(timm.create_model('resnet18_cifar', device='meta'), {})


@given(st.sampled_from(EVERY_KIND), st.integers(1, 8), st.integers(0, 2 ** 16))
@settings(deadline=None, max_examples=12)
def test_truncated_values_are_the_nearest_of_their_rank(kind, rank, seed):
    """The error equals the dropped singular values, and nothing else changes."""
    net = random_net(*kind, seed=seed)
    truncated = truncate_values(net, rank)
    for block, whole in zip(truncated.blocks, net.blocks):
        weights = [attn.value.weight.detach().unflatten(1, (4, 8)) for attn in (block.attn, whole.attn)]
        error = (weights[0] - weights[1]).norm(dim=(0, 2))
        torch.testing.assert_close(error, torch.linalg.svdvals(weights[1].transpose(0, 1))[:, rank:].norm(dim=1))
        assert (torch.linalg.matrix_rank(weights[0].transpose(0, 1)) == rank).all()
        block.attn.value.weight.data = whole.attn.value.weight.detach()
    torch.testing.assert_close(truncated(noise(2, 3, 8, 8)), net(noise(2, 3, 8, 8)))
    with pytest.raises(ValueError, match='rank=9: needs an integer from 1 to 8'):
        truncate_values(net, 9)


FUSED_KINDS = [
    *(dict(encoding=encoding, terms=terms) for encoding, terms in EVERY_KIND),
    dict(num_heads=(3, 2)), dict(hierarchical=True, attn_proj=False),
    dict(encoding='learned', terms=('content', 'content_position'), hierarchical=True)]


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(FUSED_KINDS))
def test_logits_are_the_nets(kwargs):
    model, x = random_net(**kwargs), noise(3, 3, 8, 8)
    state = copy.deepcopy(model.state_dict())
    fused = fuse(model)
    for net in (fused, reparameterize_model(model)):
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-10)
        assert all(isinstance(block.attn.proj, torch.nn.Identity) for block in net.blocks)
    assert not any(p.requires_grad for p in fused.parameters()) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


def test_layers_and_nets_for_features(small_net, images):
    backbone, x = small_net('sa_quadratic_cifar', features_only=True, out_indices=(0, 1)).eval(), images(2, 3, 32, 32)
    torch.testing.assert_close(fuse(backbone)(x), backbone(x), rtol=1e-4, atol=1e-5)
    layer, grid = random_net().blocks[0].attn, noise(2, 5, 6, 8)
    torch.testing.assert_close(fuse(layer)(grid), layer(grid))
    with pytest.raises(ValueError, match='model=ResNetCifar: has no SelfAttention2d'):
        fuse(timm.create_model('resnet_tiny_cifar', device='meta'))


def test_adapters_and_hooks_elsewhere_stay():
    """Merged layers with adapters are refused, see tests/layers/test_parameters.py."""
    model, x, calls = random_net('learned', ('content', 'content_position')), noise(2, 3, 8, 8), []
    model.blocks[0].attn.query = Lora(model.blocks[0].attn.query)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: calls.append(module) or 1.5 * out)
    model.blocks[1].mlp.fc1 = Lora(model.blocks[1].mlp.fc1)
    torch.testing.assert_close(fuse(model)(x), model(x))
    assert len(calls) == 2
