import contextlib
import copy
import cProfile
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from held import Memory, held_at_once, needs_fakes
from timm_selfconv import attention_maps, layers
from timm_selfconv.layers import SelfAttention2d, TERMS
from tiny_nets import EVERY_KIND, noise, randomised


def reference(attn, x, terms, encoding):
    """Compute equations (1), (3), (4) and (8) with explicit maps, term by term: the output and the maps."""
    e, scale, heads = attn.encoding, x.shape[3] ** -0.5, attn.num_heads
    scored = e(x) if attn.absolute else x
    query, key = (m(scored).unflatten(3, (heads, -1)) if m else None for m in (attn.query, attn.key))
    rows, cols = (torch.arange(n) - torch.arange(n)[:, None] for n in x.shape[1:3])  # key - query
    d1, d2 = torch.broadcast_tensors(rows[:, None, :, None], cols[None, :, None])
    scores = torch.zeros(len(x), heads, *d1.shape, dtype=x.dtype)
    if 'content' in terms:
        scores = scores + scale * torch.einsum('bijhd,bkmhd->bhijkm', query, key)
    if 'key_bias' in terms:
        scores = scores + scale * torch.einsum('hd,bkmhd->bhkm', attn.key_bias, key)[:, :, None, None]
    if encoding == 'learned' and attn.relative:
        r = torch.cat([t[d + len(t) // 2] for t, d in ((e.row_table, d1), (e.col_table, d2))], -1)
    else:
        r = [d1 * d1, d2 * d2, d1, d2, d1 * d2] if encoding == 'quadratic_gen' else [d1 * d1 + d2 * d2, d1, d2]
        r = torch.stack(r, -1).to(x.dtype)
    if 'position' in terms and encoding == 'learned':
        scores = scores + torch.einsum('hd,ijkmd->hijkm', torch.cat([e.row_keys, e.col_keys], -1), r)
    elif 'position' in terms:
        root = e.spreads if encoding == 'quadratic_gen' else e.spreads[:, None, None] * torch.eye(2)
        distance = torch.stack([d1, d2], -1)[..., None, :] - e.centers
        scores = scores - 0.5 * torch.einsum('ijkmha,hab->hijkmb', distance, root).square().sum(-1)
    if 'content_position' in terms:
        weights = query if encoding == 'learned' else torch.einsum('bijhd,hdr->bijhr', query, e.query_weight)
        scores = scores + scale * torch.einsum('bijhr,ijkmr->bhijkm', weights, r)
    maps = scores.flatten(4).softmax(-1).view_as(scores)
    gathered = torch.einsum('bhijkm,bkmd->bijhd', maps, x).flatten(3)
    return attn.proj(attn.value(gathered)), maps


@pytest.mark.parametrize('encoding,terms', EVERY_KIND)
def test_every_choice_of_terms_is_equation_8(encoding, terms):
    """Compare maps, outputs and gradients of every formula: default, explicit maps, fused attention, row by row."""
    attn = randomised(SelfAttention2d(4, 3, terms, encoding, grid_size=(5, 6), dtype=torch.float64))
    x = noise(2, 5, 6, 4)

    def step(out):
        return out, torch.autograd.grad(out.square().sum(), list(attn.parameters()), retain_graph=True)

    expected, maps = reference(attn, x, terms, encoding)
    torch.testing.assert_close(attn.attention_probs(x), maps)
    wanted = step(expected)
    for formula in (contextlib.nullcontext(), mock.patch.object(attn, 'fused_attn', False), held_at_once(1)):
        with formula:
            torch.testing.assert_close(step(attn(x)), wanted)
    with held_at_once(1), torch.no_grad():
        torch.testing.assert_close(attn(x), expected)
        assert attn(x[:0]).shape == (0, 5, 6, 4)
    if attn.key is not None:  # keys of other images, by name
        key = attn.keys(x.flip(0))
        attn.register_forward_pre_hook(lambda attn, args, kwargs: (args, dict(key=key)), with_kwargs=True)
        torch.testing.assert_close(attention_maps(attn, x), [attn.attention_probs(x, key)])


@pytest.mark.parametrize('encoding', ['quadratic', 'learned'])
def test_maps_are_made_only_on_request(encoding):
    attn, x = SelfAttention2d(64, 3, encoding=encoding).eval(), torch.randn(1, 16, 16, 64)
    for module in attn.modules():  # as profilers do
        module.register_forward_hook(lambda module, args, out: None)
    with Memory() as memory, torch.no_grad():
        expected = attn(x)
    assert memory.largest <= 3 * 16 ** 2 * 64
    seen = []
    handle = attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    torch.testing.assert_close(attn(x), expected)
    handle.remove()
    with mock.patch.object(attn, 'fused_attn', False), Memory() as memory, torch.no_grad():
        torch.testing.assert_close(attn(x), expected)
    assert memory.largest >= 3 * 16 ** 4 and seen == [(1, 3, 256, 256)]


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
    attn = randomised(SelfAttention2d(8, 3, encoding=encoding, grid_size=(12, 12))).to(dtype)
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
        for formula in (contextlib.nullcontext(), mock.patch.object(attn, 'fused_attn', False), held_at_once(1)):
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
def test_a_training_step_with_content_needs_memory_linear_in_the_pixels(dtype):
    """A tensor of all scores would need 5.6 times as much memory."""
    peaks = []
    for side in (16, 32):
        attn = SelfAttention2d(128, 2, ('content', 'content_position'), 'learned', grid_size=(side, side))
        x = torch.randn(1, side, side, 128, requires_grad=True)
        with held_at_once(1), Memory() as memory:
            with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = attn(x)
            out.sum().backward()
        peaks.append(memory.peak)
    assert 3 * peaks[0] < peaks[1] <= 4.6 * peaks[0]


def test_arguments_that_make_no_sense_are_named():
    for kwargs, match in (
            (dict(num_heads=0), 'num_heads=0: needs an integer of at least 1'),
            (dict(dim=2.5), 'dim=2.5: needs an integer of at least 1'),
            (dict(grid_size=(4, 0)), 'columns=0: needs an integer of at least 1'),
            (dict(terms=()), r'terms=\(\).*content_position'),
            (dict(terms=('content', 'content')), 'each once'),
            (dict(terms=('value',)), "terms=.*'value'"),
            (dict(encoding='cubic'), "encoding='cubic'.*quadratic_gen"),
            (dict(encoding='sinusoid'), "terms=.*'position'.*absolute"),
            (dict(dim=6, encoding='sinusoid', terms='content'), 'dim=6.*multiple of 4'),
            (dict(dim=5, encoding='learned', terms='content_position'), 'dim=5.*even')):
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
        with Memory() as memory, torch.no_grad():
            out = attn(x)
    assert out.device == x.device and out.shape == x.shape
    assert memory.peak < 1.6 * 2 ** 30


def test_inputs_that_do_not_fit_are_named():
    attn = SelfAttention2d(8, 2, TERMS)
    for use in (attn, attn.attention_probs, attn.keys):
        for shape in ((2, 8, 4, 4), (4, 4, 8), (2, 4, 4, 7), (2, 0, 4, 8), (2, 16, 8)):
            with pytest.raises(ValueError, match=rf'{re.escape(str(list(shape)))}: needs shape \(B, H, W, 8\)'):
                use(torch.randn(shape))
    keyless = SelfAttention2d(8, 2)
    for net, shape, heads in (
            (attn, (2, 2, 12, 8), 2), (attn, (3, 2, 16, 8), 2), (attn, (2, 1, 16, 8), 2), (keyless, (2, 2, 16, 8), 0)):
        error = rf'{re.escape(str(list(shape)))}: needs keys of 2 images or 1, of shape \[{heads}, 16, 8\]; only layers'
        for use in (net, net.attention_probs):
            with pytest.raises(ValueError, match=error):
                use(torch.zeros(2, 4, 4, 8), torch.zeros(shape))
    for heads in ([], [0, 2], [-1]):
        with pytest.raises(ValueError, match=rf'heads={re.escape(str(heads))}: needs one or more heads from 0 to 1'):
            attn.keep_heads(heads)
    with pytest.raises(ValueError, match=r"terms=\('position',\): only layers with content or key_bias have keys"):
        keyless.keys(torch.zeros(2, 4, 4, 8))
    with pytest.raises(ValueError, match=r'5 positions.*reaches 4.*set_input_size'):
        SelfAttention2d(8, 2, encoding='learned', grid_size=4)(torch.zeros(1, 4, 5, 8))


def test_a_forward_is_at_most_9_functions_in_4_files():
    package = str(Path(layers.__file__).parents[1])
    for encoding, terms in EVERY_KIND:
        attn, x = SelfAttention2d(64, 3, terms, encoding, grid_size=(8, 8)).eval(), torch.randn(2, 8, 8, 64)
        with torch.no_grad(), cProfile.Profile(builtins=False) as profile:
            attn(x)
        seen = {entry.code for entry in profile.getstats() if entry.code.co_filename.startswith(package)}
        assert 0 < len(seen) <= 9, sorted(code.co_name for code in seen)
        assert len({code.co_filename for code in seen}) <= 4
