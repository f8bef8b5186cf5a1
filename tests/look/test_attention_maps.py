"""Attention maps and footprints against dense formulas and the nets' own outputs."""
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import timm_selfconv
from timm_selfconv.layers import ConvAttention, SanAttention2d
from timm_selfconv.look.attention_maps import footprint_weights, layer_names, looks_at_content, position_gates
from timm_selfconv.look.explorer import describe_attention
from timm_selfconv.look.transformers import LayerProbs
from timm_selfconv.theory import convs_to_attention
from timm_selfconv.theory.gaussians import position_blobs
from tiny_nets import randomised

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2, num_heads=2)


@pytest.mark.parametrize('look,name,kwargs', [
    (timm_selfconv.attention_maps, 'sa_learned_content_hier_cifar', SMALL),
    (timm_selfconv.attention_maps, 'resvit_cifar', SMALL),
    (footprint_weights, 'san_pairwise_cifar', dict(channels=(32, 32), depths=(1, 1)))])
def test_another_thread_may_use_the_net(look, name, kwargs):
    """Logits, modes, flags and buffers do not change, although one module is in training mode."""
    model = timm.create_model(name, **kwargs).eval()
    model.get_classifier().train()
    images, others = torch.randn(2, 1, 3, 32, 32)

    def visible():
        with torch.no_grad():
            logits = model(others)
        flags = [(m.training, getattr(m, 'fused_attn', None)) for m in model.modules()]
        return flags, [*map(torch.clone, (logits, *model.buffers()))]

    before, expected = visible(), look(model, images)
    with ThreadPoolExecutor(1) as pool:
        looks = [pool.submit(look, model, images) for _ in range(8)]
        while not looks[-1].done():
            torch.testing.assert_close(visible(), before)
    torch.testing.assert_close([seen.result() for seen in looks], 8 * [expected])


@pytest.mark.parametrize('padding_mode', ['circular', 'reflect', 'replicate'])
def test_convolutions_that_became_attention_gather_what_their_maps_say(padding_mode):
    """Without zeros around it a layer's output is the sum of its maps times its values, at the queries that it has."""
    conv = torch.nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), padding_mode=padding_mode)
    layer = randomised(ConvAttention(conv.double(), 0.7), std=1.)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    maps, = timm_selfconv.attention_maps(layer, x)
    assert not looks_at_content(layer) and maps.shape == (2, 6, 6, 7, 6, 7)
    out = torch.einsum('bhijkl,bckl,hoc->boij', maps, x, layer.value_weight) + layer.bias[:, None, None]
    got = layer(x)  # the first query is one row above the first pixel, in the same column
    torch.testing.assert_close(got[:, :, 1:4], out[:, :, 1::2][..., :got.shape[3]], rtol=1e-9, atol=1e-9)


def test_maps_of_a_converted_stage_follow_its_scores():
    """Without attention to zero padding; strided stages on the grid of their input."""
    cnn = timm.create_model('resnet_tiny_cifar', channels=(4, 4, 4, 4), layers=(1, 1, 1, 1)).eval()
    model, _ = convs_to_attention(cnn, ['layer2', 'layer4'], alpha=0.5)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ConvAttention)}
    maps = timm_selfconv.attention_maps(model, torch.randn(2, 3, 16, 24))
    assert layer_names(model, len(maps)) == list(layers) == [
        f'{stage}.0.{conv}' for stage in ('layer2', 'layer4') for conv in ('conv1', 'conv2', 'downsample.0')]
    assert [m.shape[-1] for m in maps] == [24, 12, 24, 6, 3, 6]
    for layer, m in zip(layers.values(), maps):
        (height, width), stride, pad = m.shape[-2:], layer.stride[0], layer.padding[0]
        probs = layer.attention_probs((height, width))[..., pad:pad + height, pad:pad + width]
        torch.testing.assert_close(m[1, :, ::stride, ::stride], probs / probs.sum((-2, -1), keepdim=True))


def test_convit():
    """Compare with the maps before timm's dropout, without the class token. Fused nets have the same maps."""
    model = randomised(timm.create_model('convit_tiny', img_size=48, embed_dim=8, depth=3, local_up_to_layer=2))
    images, wanted = torch.randn(2, 3, 48, 48), []
    maps = timm_selfconv.attention_maps(model, images)
    fused = timm_selfconv.attention_maps(timm_selfconv.fuse(model), images)
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda _, args, out: wanted.append(out))
    model(images)
    wanted[2] = F.normalize(wanted[2][..., 1:, 1:], p=1, dim=-1)
    for layers in (maps, fused):
        torch.testing.assert_close([x.flatten(4).flatten(2, 3) for x in layers], wanted, rtol=1e-4, atol=1e-6)
    assert position_gates(model) == [*(b.attn.gating_param.sigmoid().tolist() for b in model.blocks[:2]), None]


def test_attention_to_prefix_tokens_is_left_out():
    probs = LayerProbs(torch.tensor([[[[0.5, 0.25, 0.25], [0.5, 0.125, 0.375], [1., 0., 0.]]]]), (1, 2))
    assert probs.maps().tolist() == [[[[[[0.25, 0.75]], [[0., 0.]]]]]]  # empty maps, without NaN
    assert probs.class_maps().tolist() == [[[[0.5, 0.5]]]]


@pytest.mark.parametrize('look,make,message', [
    (timm_selfconv.attention_maps, 'san_pairwise_hier_cifar', 'model=san_pairwise_hier_cifar: has no attention maps'),
    (timm_selfconv.attention_maps, 'resnet18_cifar', 'model=resnet18_cifar: has no attention maps'),
    (footprint_weights, 'resnet18_cifar', 'model=ResNetCifar: has no SanAttention2d'),
    # attention along one axis, and a transformer with a converted convolution
    (timm_selfconv.attention_maps, lambda: ConvAttention(torch.nn.Conv1d(3, 3, 3)), 'ConvAttention cannot be read'),
    (timm_selfconv.attention_maps, lambda: convs_to_attention(
        timm.models.VisionTransformer(img_size=32, embed_dim=8, depth=1, num_heads=1), input_size=(3, 32, 32))[0],
     'ConvAttention cannot be read')])
def test_maps_that_cannot_be_read_are_refused(look, make, message):
    model = make() if callable(make) else timm.create_model(make)
    with pytest.raises(ValueError, match=message):
        look(model, torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize('kind,hierarchical', [('pairwise', False), ('patchwise', True)])
def test_footprint_weights_times_values_are_the_output(kind, hierarchical):
    """Each output pixel is the weighted sum over its 3 x 3 footprint, with reflected borders, in float64."""
    kwargs = dict(channels=(32, 32), depths=(1, 1), kind=kind, hierarchical=hierarchical)
    model = timm.create_model('san_pairwise_cifar', **kwargs).eval().double()
    seen = []
    for layer in [m for m in model.modules() if isinstance(m, SanAttention2d)]:
        layer.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0], out)))
    weights = footprint_weights(model, torch.randn(1, 3, 8, 12).double())
    assert len(weights) == len(seen) == 2
    for w, (layer, x, out) in zip(weights, seen):
        height, width = x.shape[2:]
        assert w.shape == (1, layer.num_maps, height, width, 3, 3)
        assert torch.allclose(w.sum((-2, -1)), torch.ones(()).double()) == (kind == 'pairwise')
        value = layer.qvk(x)[0, layer.query_dim:layer.query_dim + layer.value_dim]
        padded = F.pad(value, (1,) * 4, mode='reflect').unfold(1, height, 1).unfold(2, width, 1)  # c, di, dj, H, W
        shared = w[0].repeat(layer.value_dim // layer.num_maps, 1, 1, 1, 1)  # channel c has map c % num_maps
        torch.testing.assert_close(out[0], torch.einsum('cabij,cijab->cij', padded, shared))


class Elsewhere(torch.Tensor):
    """Simulates a device without float64, such as MPS."""

    def __deepcopy__(self, memo):
        return torch.nn.Parameter(self.detach().clone())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return out.as_subclass(torch.Tensor)
        if any(isinstance(x, cls) and x.dtype == torch.float64 for x in tree_leaves(out)):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return out


@pytest.mark.parametrize('name', ['sa_quadratic_gen_cifar', 'sa_learned_content_hier_cifar'])
def test_a_device_need_not_have_float64(name, monkeypatch):
    model, images = timm.create_model(name, **SMALL).eval(), torch.randn(2, 3, 32, 32)
    # .to(device) replaces parameters
    monkeypatch.setattr(torch.__future__, '_overwrite_module_params_on_conversion', True)
    moved, there = copy.deepcopy(model)._apply(lambda x: x.as_subclass(Elsewhere)), images.as_subclass(Elsewhere)
    with pytest.raises(TypeError, match='float64'):
        moved.double()
    torch.testing.assert_close(timm_selfconv.attention_maps(moved, there), timm_selfconv.attention_maps(model, images))
    with torch.no_grad():
        assert describe_attention(moved, there) == describe_attention(model, images)
    for blobs, theirs in zip(position_blobs(moved) or (), position_blobs(model) or (), strict=True):
        torch.testing.assert_close(blobs.centers, theirs.centers)
