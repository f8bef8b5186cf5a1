import contextlib
import copy
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from held import LargestTensor, PeakBytes, held_at_once, needs_fakes, saved_bytes
from timm_selfconv.layers import SelfAttention2d, TERMS
from tiny_nets import EVERY_KIND


def randomise(attn):
    """Set random parameters that are neither near zero nor symmetric."""
    for p in attn.parameters():
        torch.nn.init.normal_(p, std=0.7)
    return attn


def relative_terms(attn, h, delta, query, terms, encoding):
    """(v_h r_delta, query Wk^ r_delta) of equation (8), 0 for terms that a layer lacks."""
    e, (d1, d2) = attn.encoding, delta
    position, of_query = 'position' in terms, 'content_position' in terms
    if encoding == 'learned':
        row, col = e.row_table[d1 + len(e.row_table) // 2], e.col_table[d2 + len(e.col_table) // 2]
        v = e.row_keys[h] @ row + e.col_keys[h] @ col if position else 0.
        return v, query @ torch.cat([row, col]) if of_query else 0.
    r = [d1 * d1, d2 * d2, d1, d2, d1 * d2] if encoding == 'quadratic_gen' else [d1 * d1 + d2 * d2, d1, d2]
    q = query @ e.query_weight[h] @ torch.tensor(r, dtype=query.dtype) if of_query else 0.
    if not position:
        return 0., q
    root = e.spreads[h] if encoding == 'quadratic_gen' else e.spreads[h] * torch.eye(2).to(e.spreads)
    d = torch.tensor([d1, d2]) - e.centers[h]
    return -0.5 * d @ root @ root.T @ d, q


def reference(attn, x, terms, encoding):
    """Compute equations (1), (3), (4) and (8) for one query, key and head at a time."""
    batch, height, width, dim = x.shape
    pixels = list(itertools.product(range(height), range(width)))
    scored = attn.encoding(x) if attn.absolute else x

    def linear(m, v, h):
        rows = slice(h * dim, (h + 1) * dim)
        return m.weight[rows] @ v + m.bias[rows] if m is not None else None

    out = torch.zeros(batch, height, width, dim, dtype=x.dtype)
    maps = torch.zeros(batch, attn.num_heads, height, width, height, width, dtype=x.dtype)
    for b, (i, j) in itertools.product(range(batch), pixels):
        gathered = []
        for h in range(attn.num_heads):
            scores, query = [], linear(attn.query, scored[b, i, j], h)
            for k, m in pixels:
                key, score = linear(attn.key, scored[b, k, m], h), torch.zeros((), dtype=x.dtype)
                if 'content' in terms:
                    score = score + query @ key / math.sqrt(dim)
                if 'key_bias' in terms:
                    score = score + attn.key_bias[h] @ key / math.sqrt(dim)
                if attn.relative:
                    v, q = relative_terms(attn, h, (k - i, m - j), query, terms, encoding)
                    score = score + v + q / math.sqrt(dim)
                scores.append(score)
            probs = torch.stack(scores).softmax(0)
            maps[b, h, i, j] = probs.view(height, width)
            gathered.append(probs @ x[b].flatten(0, 1))
        value = attn.value.weight @ torch.cat(gathered) + attn.value.bias
        out[b, i, j] = attn.proj.weight @ value + attn.proj.bias
    return out, maps


@contextlib.contextmanager
def explicit(attn):
    attn.fused_attn = False
    yield
    attn.fused_attn = True


@settings(deadline=None, max_examples=len(EVERY_KIND))
@given(st.sampled_from(EVERY_KIND))
def test_every_choice_of_terms_is_equation_8(kind):
    """Compare maps, outputs and gradients of every formula: default, explicit maps, fused attention, row by row."""
    torch.manual_seed(0)
    encoding, terms = kind
    attn = randomise(SelfAttention2d(4, 2, terms, encoding, grid_size=(3, 2), dtype=torch.float64)).eval()
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64)

    def step(out):
        return out, torch.autograd.grad(out.square().sum(), list(attn.parameters()), retain_graph=True)

    expected, maps = reference(attn, x, terms, encoding)
    torch.testing.assert_close(attn.attention_probs(x), maps)
    wanted = step(expected)
    for formula in (contextlib.nullcontext(), explicit(attn), held_at_once(1)):
        with formula:
            torch.testing.assert_close(step(attn(x)), wanted)
    with held_at_once(1), torch.no_grad():
        torch.testing.assert_close(attn(x), expected)


@pytest.mark.parametrize('encoding', ['quadratic', 'learned'])
def test_maps_are_made_only_on_request(encoding):
    attn, x = SelfAttention2d(64, 3, encoding=encoding).eval(), torch.randn(1, 16, 16, 64)
    for module in attn.modules():  # as profilers do
        module.register_forward_hook(lambda module, args, out: None)
    with LargestTensor() as largest, torch.no_grad():
        expected = attn(x)
    assert largest.numel <= 3 * 16 ** 2 * 64
    seen = []
    handle = attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    torch.testing.assert_close(attn(x), expected)
    handle.remove()
    with explicit(attn), LargestTensor() as largest, torch.no_grad():
        torch.testing.assert_close(attn(x), expected)
    assert largest.numel >= 3 * 16 ** 4 and seen == [(1, 3, 256, 256)]


def test_probability_dropout_takes_the_map_and_gives_the_same_numbers():
    torch.manual_seed(0)
    attn = SelfAttention2d(8, 3, attn_drop=1e-12).train()
    x = torch.randn(2, 5, 4, 8)
    in_training = attn(x)
    torch.testing.assert_close(in_training, attn.eval()(x))
    attn.attn_drop.p = 0.5
    assert not torch.allclose(attn.train()(x), in_training, atol=1e-3)


@pytest.mark.parametrize('encoding,dtype', [
    ('quadratic', torch.float16), ('quadratic_gen', torch.bfloat16), ('learned', torch.bfloat16)])
def test_maps_of_half_precision_layers_are_made_in_float32(encoding, dtype):
    torch.manual_seed(0)
    attn = randomise(SelfAttention2d(8, 3, encoding=encoding, grid_size=(12, 12))).to(dtype)
    x = torch.randn(1, 12, 12, 8, dtype=dtype)
    probs = attn.attention_probs(x)
    assert probs.dtype == torch.float32
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(attn.attention_probs(x), probs)
    torch.testing.assert_close(attn.float().attention_probs(x.float()), probs)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([0.3, 16., 32., 256., 4096., 1e4]), st.sampled_from([0., 0.01, 1., 1e3]),
    st.sampled_from([('position',), ('content', 'position'), TERMS]))
def test_far_and_sharp_heads_in_float32(center, spread, terms):
    """Compare maps and outputs of every formula with float64."""
    torch.manual_seed(0)
    attn = SelfAttention2d(8, 3, terms).eval()
    with torch.no_grad():
        attn.encoding.centers.copy_(torch.tensor([[center, 0.7], [-0.5, -center], [center, -center]]))
        attn.encoding.spreads.fill_(spread)
        x = torch.randn(2, 16, 16, 8)
        exact = copy.deepcopy(attn).double()
        torch.testing.assert_close(
            attn.attention_probs(x).double(), exact.attention_probs(x.double()), rtol=0, atol=1e-4)
        for formula in (contextlib.nullcontext(), explicit(attn), held_at_once(1)):
            with formula:
                torch.testing.assert_close(attn(x).double(), exact(x.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('center,dtype,tolerance,fused', [
    (1., torch.bfloat16, 0.02, True), (4096., torch.bfloat16, 0.02, False), (4096., torch.float16, 0.003, True)])
def test_content_and_far_centres_in_half_precision(center, dtype, tolerance, fused):
    torch.manual_seed(0)
    attn = SelfAttention2d(32, 3, ('content', 'position')).eval()
    with torch.no_grad():
        attn.encoding.centers.fill_(center)
        x = torch.randn(2, 16, 16, 32)
        expected = copy.deepcopy(attn).double()(x.double())
        with torch.autocast('cpu', dtype), held_at_once(1 if fused else 2 ** 29):
            out = attn(x)
        assert (out - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_training_step_with_content_keeps_memory_linear_in_the_pixels(dtype):
    """A tensor of all scores would need 5.6 times as much memory."""
    kept = []
    for side in (16, 32):
        attn = SelfAttention2d(128, 2, ('content', 'content_position'), 'learned', grid_size=(side, side))
        x = torch.randn(1, side, side, 128, requires_grad=True)
        with held_at_once(1), torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
            kept.append(saved_bytes(attn, x)[0])
    assert 3 * kept[0] < kept[1] <= 4.6 * kept[0]


def test_arguments_that_make_no_sense_are_named():
    for kwargs, match in (
            (dict(num_heads=0), 'num_heads=0: needs an integer of at least 1'),
            (dict(dim=2.5), 'dim=2.5: needs an integer of at least 1'),
            (dict(terms=()), r'terms=\(\).*content_position'),
            (dict(terms=('content', 'content')), 'each once'),
            (dict(terms=('value',)), "terms=.*'value'"),
            (dict(encoding='cubic'), "encoding='cubic'.*quadratic_gen"),
            (dict(encoding='sinusoid'), "terms=.*'position'.*absolute")):
        with pytest.raises(ValueError, match=match):
            SelfAttention2d(**{'dim': 8, **kwargs})


@needs_fakes
@pytest.mark.parametrize('encoding,terms,device', [
    ('quadratic', ('position',), 'cpu'), ('quadratic_gen', ('position',), 'cuda'),
    ('learned', ('content', 'content_position'), 'cpu')])
def test_images_of_224_pixels_stay_under_1_6_gib(encoding, terms, device):
    """One layer of the full-size nets, one image."""
    with FakeTensorMode():
        attn = SelfAttention2d(400, 9, terms, encoding, grid_size=(112, 112), device=device).eval()
        x = torch.randn(1, 112, 112, 400, device=device)
        with PeakBytes() as memory, torch.no_grad():
            out = attn(x)
    assert out.device == x.device and out.shape == x.shape
    assert memory.peak < 1.6 * 2 ** 30


def test_inputs_that_do_not_fit_are_named():
    attn = SelfAttention2d(8, 2)
    for shape in ((2, 8, 4, 4), (4, 4, 8), (2, 4, 4, 7), (2, 0, 4, 8), (2, 16, 8)):
        with pytest.raises(ValueError, match=rf'{re.escape(str(list(shape)))}: needs shape \(B, H, W, 8\)'):
            attn(torch.randn(shape))
        with pytest.raises(ValueError, match='needs shape'):
            attn.attention_probs(torch.randn(shape))
