import copy

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from timm.models import save_for_hf

from timm_selfconv.theory import merge_heads
from timm_selfconv.theory.merging import merge_values
from tiny_nets import noise, random_net

SMALL = dict(img_size=8, embed_dim=8, mlp_dim=12, depth=2)
IMAGES = noise(64, 3, 8, 8)


def gathered(net, layer, x):
    """Return inputs of a layer's values from explicit maps, shape (B H W, heads, dim)."""
    inputs = []
    attn = net.blocks[layer].attn
    hook = attn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    net(x)
    hook.remove()
    hidden = inputs[0]
    probs = attn.attention_probs(hidden).flatten(4).flatten(2, 3)
    return torch.einsum('bhqk,bkd->bqhd', probs, hidden.flatten(1, 2)).flatten(0, 1)


def least_squares(covariance, values, kept):
    """Return the best values of the remaining heads and their loss, by definition."""
    dim, out = values.shape[1:]
    root = torch.linalg.cholesky(covariance).T  # covariance = root' root
    columns = torch.cat([torch.arange(dim) + head * dim for head in kept])
    target = root @ values.reshape(-1, out)
    best = torch.linalg.lstsq(root[:, columns], target).solution
    return best.view(len(kept), dim, out), float((root[:, columns] @ best - target).square().sum())


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2 ** 31), st.data())
def test_order_values_and_loss_against_least_squares(heads, dim, out, seed, data):
    keep = data.draw(st.integers(1, heads))
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(3 * heads * dim + 5, heads * dim, dtype=torch.float64, generator=generator)
    covariance = samples.T @ samples / len(samples)
    values = torch.randn(heads, dim, out, dtype=torch.float64, generator=generator)
    dropped, merged, loss = merge_values(covariance, values, keep)
    assert len(dropped) == heads - keep == len(set(dropped))

    left = list(range(heads))
    for head in dropped:
        losses = {other: least_squares(covariance, values, [h for h in left if h != other])[1] for other in left}
        assert losses[head] <= min(losses.values()) * (1 + 1e-9) + 1e-12
        left.remove(head)
    expected, least = least_squares(covariance, values, left)
    torch.testing.assert_close(merged, expected, rtol=1e-7, atol=1e-7)
    assert loss == pytest.approx(least if dropped else 0., rel=1e-7, abs=1e-10)


def test_values_and_bias_against_a_regression():
    net = random_net(encoding='learned', terms=('content', 'content_position'))
    x = IMAGES[:16]
    merged, (report,) = merge_heads(net, (2, 4), x)
    kept = [head for head in range(4) if head not in report.dropped]
    before, after = net.blocks[0].attn, merged.blocks[0].attn
    assert merged.num_heads == (2, 4) and report.layer == 0 and after.num_heads == 2

    features = gathered(net, 0, x).detach()
    target = features.flatten(1) @ before.value.weight.detach().T + before.value.bias.detach()
    columns = torch.cat([features[:, kept].flatten(1), torch.ones(len(features), 1).double()], dim=1)
    solution = torch.linalg.lstsq(columns, target).solution
    best, ours = columns @ solution, after.value(features[:, kept].flatten(1)).detach()
    error = ((target - ours).var(dim=0, unbiased=False).sum() / target.var(dim=0, unbiased=False).sum()).sqrt()
    assert report.error == pytest.approx(float(error), rel=1e-3, abs=1e-4)
    assert (target - ours).norm() <= (target - best).norm() * (1 + 1e-4) + 1e-4 * target.norm()


def test_later_layers_are_fitted_after_earlier_ones():
    """Both layers at once give the same net as one after the other."""
    net = random_net(encoding='quadratic_gen', num_heads=(4, 4))
    at_once, both = merge_heads(net, (2, 3), IMAGES)
    first, one = merge_heads(net, (2, 4), IMAGES)
    second, two = merge_heads(first, (2, 3), IMAGES)
    assert both == one + two
    torch.testing.assert_close(dict(at_once.state_dict()), dict(second.state_dict()), rtol=1e-9, atol=1e-9)


def test_nothing_else_changes_and_timm_saves_it(tmp_path):
    net = timm.create_model('sa_quadratic_cifar', **SMALL, num_heads=4, num_classes=3).train()
    state, x = copy.deepcopy(net.state_dict()), IMAGES.float()
    merged, _ = merge_heads(net, (3, 4), x)
    assert merged.training and net.training and {p.dtype for p in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == {'blocks.0.attn.' + name for name in (
        'value.weight', 'value.bias', 'encoding.centers', 'encoding.spreads')}
    save_for_hf(merged, tmp_path / 'merged', safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'merged'}", pretrained=True).eval()
    torch.testing.assert_close(loaded(x), merged.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize('num_heads,x,match', [
    ((2,), IMAGES[:2], r'num_heads=\(2,\): needs one number for each layer, from 1 to \(4, 4\)'),
    ((2, 2), IMAGES[:0], r'images=\(0, 3, 8, 8\): needs at least one'),
    ((2, 2), IMAGES[:2] * float('nan'), 'images: the inputs of layer 0 are equal at all pixels, or not finite')])
def test_bad_arguments_of_a_merge_are_named(num_heads, x, match):
    with pytest.raises(ValueError, match=match):
        merge_heads(random_net(), num_heads, x)
