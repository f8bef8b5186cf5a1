"""Fused nets against the nets that they are made of, and their errors against what the tolerance says."""
import copy

import pytest
import timm
import torch
import torch.nn as nn

from lora import Lora, MergeableLora
from timm_selfconv import fuse
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.kernels.low_rank import low_rank, work_out
from timm_selfconv.theory import conv_to_attention, include, prune_heads, reparameterizable

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)
TOLERANCES = (1e-6, 1e-4, 1e-2, 0.3)


def small(name='sa_quadratic_cifar', **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
    with torch.no_grad():  # narrow heads, wide heads, heads that look past the border
        for m in model.modules():
            if getattr(m, 'spreads', None) is not None and m.spreads.dim() == 1:
                m.spreads.copy_(torch.logspace(-2, 0.5, len(m.spreads)))
    return model


def assert_same(fused, model, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name,kwargs', [
    ('sa_quadratic_cifar', {}),
    ('sa_quadratic_cifar', dict(hierarchical=True, attn_proj=False)),
    ('sa_quadratic_gen_pruned_cifar', dict(num_heads=(3, 2))),
    ('sa_learned_cifar', {}),
    ('sa_learned_content_cifar', {}),
    ('sa_learned_content_hier_cifar', {}),
    ('sa_quadratic_cifar', dict(terms=('content', 'content_position', 'key_bias', 'position'))),
    ('sa_quadratic_cifar', dict(encoding='sinusoid', terms=('content',))),
])
def test_logits_are_the_nets(name, kwargs, images):
    model = small(name, **kwargs)
    state = copy.deepcopy(model.state_dict())
    x = images(3, 3, 32, 32)
    fused = fuse(model)
    assert_same(fused, model, x)
    assert_same(fuse(model, 1e-6), model, x)
    assert all(isinstance(m.proj, nn.Identity) for m in fused.modules() if isinstance(m, SelfAttention2d))
    assert not any(p.requires_grad for p in fused.parameters()) and all(p.requires_grad for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize('rank', [1, 3, 5])
def test_the_smallest_rank_within_a_tolerance(rank, images):
    u, v = torch.linalg.qr(images(8, 8).double())[0], torch.linalg.qr(images(6, 6).double())[0]
    singular = torch.tensor([2., 1., 0.5, 0.25, 0.125, 0.0625]).double()
    matrix = (u[:, :6] * singular) @ v.T
    left, right = low_rank(matrix, 1.01 * float(singular[rank]))
    assert left.shape == (8, rank) and right.shape == (rank, 6)
    assert float(torch.linalg.matrix_norm(matrix - left @ right, 2)) == pytest.approx(float(singular[rank]))
    torch.testing.assert_close(right @ right.T, torch.eye(rank).double())


@pytest.mark.parametrize('tolerance', TOLERANCES)
def test_a_tolerance_bounds_every_map(tolerance, images):
    """Operator norm and largest entry of the dense maps' errors, and the layer's output, all in float64."""
    attn = small('sa_quadratic_cifar', depth=1, embed_dim=64).blocks[0].attn.double()
    fused = attn.fuse(tolerance)
    x = images(1, 12, 10, 64).double()
    with torch.no_grad():
        out, expected = fused(x), attn(x)
        maps = attn.attention_probs(x)[0].flatten(3).flatten(1, 2)
        rows, cols, _ = attn.encoding(None, 12, 10)
        heads = work_out(rows[0, :, :, 0].softmax(-1), cols[0, :, 0].softmax(-1), tolerance, 64, torch.float64)
    bound, low, lost = 0., 0, 0.
    for head, dense, weight in zip(heads, maps, fused.value.weight.split(64, dim=1)):
        rows, cols = head.query_rows, head.query_cols
        if head.key_rows is not None:
            rows, cols, low = rows @ head.key_rows, cols @ head.key_cols, low + 1
        error = torch.kron(rows, cols) - dense
        norm = float(torch.linalg.matrix_norm(error, 2))
        assert norm <= tolerance * (1 + 1e-6) and float(error.abs().max()) <= tolerance
        bound += tolerance * float(torch.linalg.matrix_norm(weight, 2))
        lost = max(lost, norm)
    assert 0 < low < len(maps)  # both kinds of heads, and something is left out
    assert lost > 1e-12
    assert float((out - expected).norm()) <= bound * float(x.norm())


def test_sizes_dtypes_and_weights_leave_no_stale_factors(images):
    model = small()
    fused = fuse(model, 1e-6)
    for size in ((32, 32), (16, 24), (32, 32)):
        assert_same(fused, model, images(2, 3, *size))
    fresh = fuse(model, 1e-6).bfloat16().float()  # rounded: another net
    assert_same(fused.bfloat16().float(), fresh, images(2, 3, 32, 32))
    with torch.no_grad():
        assert (fresh(images(2, 3, 32, 32)) - model(images(2, 3, 32, 32))).abs().max() > 1e-4
    assert_same(fused.double(), fresh.double(), images(2, 3, 32, 32).double())

    learned = small('sa_learned_cifar')
    fused = fuse(learned)
    fused(images(1, 3, 16, 16))
    for net in (learned, fused):
        net.set_input_size(img_size=48)
    assert_same(fused, learned, images(1, 3, 16, 16))
    with pytest.raises(ValueError, match='reaches 24'):
        fused(images(1, 3, 64, 64))


def test_half_precision_and_autocast_lose_no_more_than_the_net(images):
    model = small(embed_dim=16)
    x = images(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        half = copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
        fused = fuse(model).bfloat16()(x.bfloat16()).float()
        with torch.autocast('cpu', torch.bfloat16):
            cast = fuse(model)(x).float()
    error = (half - expected).abs().max()
    assert 0 < (fused - expected).abs().max() < 2 * error and 0 < (cast - expected).abs().max() < 2 * error


def test_gradients_of_images(images):
    model, grads = small(), []
    for net in (model, fuse(model)):
        x = images(2, 3, 32, 32).requires_grad_()
        net(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


def test_inference_mode_leaves_nothing_that_autograd_cannot_use(images):
    fused = fuse(small())
    with torch.inference_mode():
        fused(images(1, 3, 32, 32))
    x = images(1, 3, 32, 32).requires_grad_()
    fused(x).sum().backward()
    assert x.grad is not None


@pytest.mark.slow
def test_compiled_nets_keep_their_own_factors(images):
    x = images(2, 3, 16, 16)
    for seed in (0, 1):
        model = small(img_size=16, depth=1)
        with torch.no_grad():
            model.blocks[0].attn.encoding.centers.add_(seed)
        fused = fuse(model, 1e-6)
        with torch.no_grad():
            fused(x)
        assert_same(torch.compile(fused, backend='eager', fullgraph=True), model, x)
    fused = fuse(model)
    assert_same(torch.compile(fused, backend='eager'), model, x)  # with factors still to be worked out


def test_features_and_what_theory_made(images):
    x = images(2, 3, 32, 32)
    backbone = small(features_only=True, out_indices=(0, 1))
    assert_same(fuse(backbone), backbone, x)
    model = small()
    for net in (prune_heads(model, {0: [0, 4], 1: [1]}), include(model, 'sa_learned_cifar'), reparameterizable(model)):
        assert_same(fuse(net, 1e-6), net, x)
    half = copy.deepcopy(model)
    half.stem = conv_to_attention(half.stem)
    assert_same(fuse(half), half, x)
    layer = model.blocks[0].attn
    assert_same(fuse(layer), layer, images(2, 5, 6, 8))


def test_what_cannot_be_fused_is_said():
    with pytest.raises(ValueError, match='model=ResNetCifar: has no SelfAttention2d'):
        fuse(timm.create_model('resnet_tiny_cifar'))
    for tolerance in (0., 1., -1e-4, float('nan'), True):
        with pytest.raises(ValueError, match=r'tolerance=.*between 0 and 1'):
            fuse(small(depth=1), tolerance)


def test_positions_are_never_those_of_before(images):
    model, changed, x = small(), small(), images(2, 3, 32, 32)
    with torch.no_grad():
        for block in changed.blocks:
            block.attn.encoding.centers.add_(1.)
        fused, other = fuse(model, 1e-6), fuse(changed, 1e-6)
        before, wanted = fused(x), changed(x)
        assert (before - wanted).abs().max() > 1e-3
        called = torch.func.functional_call(fused, dict(other.named_parameters()), (x,))
        torch.testing.assert_close(called, wanted, rtol=1e-4, atol=1e-5)
        assert_same(fused, model, x)
        fused.load_state_dict(other.state_dict())
        assert_same(fused, changed, x)


@pytest.mark.parametrize('name', ['value', 'proj'])
def test_what_is_folded_must_say_all_of_itself(name):
    """See test_adapters.py for all that is refused."""
    model = small()
    setattr(model.blocks[1].attn, name, Lora(getattr(model.blocks[1].attn, name)))
    with pytest.raises(ValueError, match=rf'blocks\.1\.attn\.{name}=.*: computes more than its weights say'):
        fuse(model)


@pytest.mark.parametrize('net', ['sa_quadratic_cifar', 'sa_learned_content_cifar'])
def test_adapters_that_merge_are_merged_and_all_others_stay(net, images):
    model, x, calls = small(net), images(2, 3, 32, 32), []
    attn = model.blocks[0].attn
    for name in ('value', 'proj'):
        setattr(attn, name, MergeableLora(getattr(attn, name)))
    if attn.query is not None:
        attn.query = Lora(attn.query)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: calls.append(module) or 1.5 * out)
    model.blocks[1].mlp.fc1 = Lora(model.blocks[1].mlp.fc1)
    for tolerance in (None, 1e-6):
        assert_same(fuse(model, tolerance), model, x)
    assert len(calls) == 4 and attn.value.on
