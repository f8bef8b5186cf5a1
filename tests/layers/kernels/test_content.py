"""Attention to keys without a tensor of scores, against the definition."""
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from held import held_at_once, in_groups
from saved import saved_bytes
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.kernels import content, key_attention
from timm_selfconv.layers.kernels.content import attend_to_keys


def inputs(batch=2, heads=3, queries=2, width=2, height=3, dim=4, channels=5, shared=True, fixed=False, seed=0):
    """Queries, keys, values and scores of rows and columns, which images may share; all ask for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    images = 1 if fixed else batch
    return (
        normal(batch, heads, queries, width, dim), normal(batch, heads, height * width, dim),
        normal(batch, 1 if shared else heads, height * width, channels),
        normal(images, heads, queries, 1 if fixed else width, height),
        normal(images, heads, 1 if fixed else queries, width, width))


def head_by_head(query, key, value, rows, cols):
    """softmax(q k' + rows + cols) v with all scores written out, one image and head at a time."""
    batch, heads, queries, width, _ = query.shape
    height, out = rows.shape[-1], []
    for b in range(batch):
        for h in range(heads):
            r = rows.expand(batch, -1, -1, width, -1)[b, h].reshape(-1, height).repeat_interleave(width, 1)
            c = cols.expand(batch, -1, queries, -1, -1)[b, h].reshape(-1, width).repeat(1, height)
            probs = (query[b, h].flatten(0, 1) @ key[b, h].T + r + c).softmax(-1)
            out.append(probs @ value[b, h if value.shape[1] > 1 else 0])
    return torch.stack(out).unflatten(0, (batch, heads)).transpose(1, 2).unflatten(1, query.shape[2:4])


CASES = dict(shared=st.booleans(), fixed=st.booleans(), seed=st.integers(0, 99), batch=st.integers(0, 3),
             queries=st.integers(1, 3), width=st.integers(1, 3), height=st.integers(1, 3))


@settings(deadline=None, max_examples=40)
@given(nbytes=st.integers(1, 2000), dim=st.sampled_from((4, 40)), **CASES)
def test_groups_of_any_size_give_each_heads_numbers_and_gradients(nbytes, **kwargs):
    tensors = inputs(**kwargs)
    with held_at_once(nbytes):
        out = key_attention(*tensors)
        if not kwargs['batch']:
            assert out.shape[0] == 0
            return
        expected = head_by_head(*tensors)
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        torch.testing.assert_close(
            torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@settings(deadline=None, max_examples=20)
@given(**{**CASES, 'batch': st.integers(1, 3)})
def test_more_channels_stand_for_scores_of_rows_and_columns(**kwargs):
    tensors = inputs(**kwargs)
    with mock.patch.object(F, 'scaled_dot_product_attention', wraps=F.scaled_dot_product_attention) as fused:
        out, expected = content.fused_attention(*tensors), head_by_head(*tensors)
    assert all(t.shape[-1] % 8 == 0 for t in fused.call_args.args[:2])
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_scores_beyond_a_dtype_stay_numbers(dtype):
    query, key, value, rows, cols = (t.detach() for t in inputs())
    rows = torch.tensor([0., -1e4, -3e38]).expand(2, 3, 2, 2, 3)
    half = (t.to(dtype) for t in (query, key, value))
    out = content.fused_attention(*half, rows, cols.float() - cols.float().amax(-1, keepdim=True))
    expected = head_by_head(query, key, value, rows.double(), cols)
    assert (out - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize('function', [key_attention, attend_to_keys])
def test_second_derivatives_where_scores_come_from_queries(function):
    query, key, value, rows, cols = inputs(1, 1, 1, 2, 2, 3, 2)

    def attend(query, key, value):
        return function(query, key, value, query[..., :2] + rows, cols + query[..., 1:])

    assert torch.autograd.gradcheck(attend, (query, key, value))
    assert torch.autograd.gradgradcheck(attend, (query, key, value))


def layer(side, dim=64, **kwargs):
    torch.manual_seed(0)
    return SelfAttention2d(dim, 2, ('content', 'content_position'), 'learned', grid_size=(side, side), **kwargs)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('fused', [False, True])
def test_what_a_step_keeps_is_linear_in_the_pixels(dtype, fused, monkeypatch):
    """Scores of rows and columns are a few more; one tensor of all scores would make it 5.6 times as much."""
    if fused:
        monkeypatch.setattr(content, 'by_keys', lambda shape, nbytes, *inputs: content.fused_attention(*inputs))
    kept = []
    for side in (16, 32):
        x = torch.randn(1, side, side, 128, requires_grad=True)
        with in_groups(), torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
            kept.append(saved_bytes(layer(side, 128), x)[0])
    assert 3 * kept[0] < kept[1] <= 4.5 * kept[0]
