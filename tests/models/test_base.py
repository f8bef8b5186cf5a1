"""The shared interface of all families. tests/test_timm_suite.py runs timm's own tests of it."""
import copy
import re

import pytest
import timm
import torch
from timm.layers import to_2tuple
from timm.models import save_for_hf
from timm.utils import AttentionExtract

import timm_selfconv
from held import held_at_once
from timm_selfconv.layers import TERMS
from tiny_nets import FAMILIES, SHALLOW, explicit_maps

BLOCK_NETS = ('sa_quadratic_cifar', 'resvit_cifar')
NETS = (
    *BLOCK_NETS, 'sa_learned_content_hier_cifar', 'resvit_hier_cifar', 'san_pairwise_cifar', 'san_pairwise_hier_cifar')
TINY = (
    'sa_quadratic_gen_tiny_cifar', 'sa_learned_tiny_cifar', 'sa_learned_content_hier_tiny_cifar', 'resvit_tiny_cifar')


@pytest.mark.parametrize('name,shape,match', [
    ('sa_quadratic_cifar', (1, 3, 33, 32), r'\[1, 3, 33, 32\].*multiples of 2'),
    ('resvit_cifar', (1, 3, 0, 32), 'multiples of 2'),
    ('sa_quadratic_cifar', (1, 1, 32, 32), r'\[1, 1, 32, 32\].*\(batch, 3, height, width\)'),
    ('san_pairwise_cifar', (1, 3, 40, 31), r'x of shape \[1, 3, 40, 31\].*at least 32'),
])
def test_images_that_do_not_fit_are_named(name, shape, match, small_net):
    with pytest.raises(ValueError, match=match):
        small_net(name)(torch.zeros(shape))


@pytest.mark.parametrize('name,kwargs,match', [
    ('sa_quadratic_cifar', dict(img_size=33), 'img_size=33.*multiples of 2'),
    ('resvit_cifar', dict(depth=0), 'depth=0'),
    ('sa_quadratic_cifar', dict(num_heads=(9, 9)), r'num_heads=\(9, 9\).*3 layers'),
    ('san_pairwise_cifar', dict(channels=(64, 96, 256)), r'channels=\(64, 96, 256\) and depths=\(2, 1, 2, 4\)'),
    ('san_pairwise_cifar', dict(depths=(1, 0, 1, 1)), r'depths=\(1, 0, 1, 1\)'),
    ('san_pairwise_cifar', dict(hierarchical=True), 'need equal numbers if stages share bottlenecks'),
    ('san_pairwise_cifar', dict(img_size=24), 'img_size=24: needs a height and width of at least 32'),
])
def test_bad_arguments_are_named(name, kwargs, match, small_net):
    with pytest.raises(ValueError, match=match):
        small_net(name, **kwargs)


@pytest.mark.parametrize('name,size,grid', [
    ('sa_quadratic_cifar', (2, 2), (1, 1)),
    ('sa_quadratic_cifar', (34, 18), (17, 9)),
    ('san_patchwise_cifar', (35, 64), (2, 4)),
    ('san_pairwise_hier_cifar', (2, 2), (2, 2)),
])
def test_nets_without_learned_positions_take_other_sizes_as_they_are(name, size, grid, small_net, images):
    model = small_net(name).eval()
    features = model.forward_features(images(1, 3, *size))
    assert features.shape == ((1, *grid, 16) if model.output_fmt == 'NHWC' else (1, 32, *grid))


@pytest.mark.parametrize('name', NETS)
def test_nets_for_features_hold_only_what_their_maps_need(name, small_net, images):
    """As DistributedDataParallel asks: every parameter that is left gets a gradient."""
    x, size = images(2, 3, 32, 64), dict(img_size=(32, 64))
    whole, net = small_net(name, **size).eval(), small_net(name, features_only=True, out_indices=(0, 1), **size).eval()
    net.model.load_state_dict(whole.state_dict(), strict=False)
    features, (_, wanted) = net(x), whole.forward_intermediates(x, indices=[0, 1])
    torch.testing.assert_close(features, wanted)
    sum(feature.square().sum() for feature in features).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize('name', NETS)
def test_checkpointing_changes_no_gradient_and_no_statistics(name, small_net, images):
    model, results = small_net(name).train(), []
    for enable in (False, True):
        net = copy.deepcopy(model)
        net.set_grad_checkpointing(enable)
        out, _ = net.forward_intermediates(images(2, 3, 32, 32))
        gradients = torch.autograd.grad(out.square().sum(), net.parameters(), allow_unused=True)
        results.append((out, gradients, dict(net.named_buffers())))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('kwargs', [
    dict(encoding='learned', terms=('content_position',)), dict(encoding='sinusoid', terms=('content',)),
    dict(encoding='learned', terms=TERMS, qk_bias=False, attn_proj=False, act_layer='relu', norm_eps=1e-5)])
def test_a_hierarchical_net_is_a_deep_one_with_shared_weights_and_keys(kwargs, small_net, images):
    """The report's definition: all layers have the same weights and use the keys of the first layer, if it has any."""
    model, deep = (small_net('sa_quadratic_cifar', hierarchical=h, **kwargs).double().eval() for h in (True, False))
    state, x, first = model.state_dict(), images(2, 3, 32, 32).double(), {}
    deep.load_state_dict({name: state[re.sub(r'blocks\.\d', 'blocks.0', name)] for name in deep.state_dict()})
    if 'content' in kwargs['terms']:
        assert not torch.allclose(model(x), deep(x))
        for block in deep.blocks:
            block.attn.key.register_forward_hook(lambda layer, args, out: first.setdefault('keys', out))
    for ours, theirs in zip(model.forward_intermediates(x)[1], deep.forward_intermediates(x)[1]):
        torch.testing.assert_close(ours, theirs)
    first.clear()
    torch.testing.assert_close(timm_selfconv.attention_maps(model, x), timm_selfconv.attention_maps(deep, x))


@pytest.mark.parametrize('name', ['sa_learned_cifar', 'resvit_cifar', 'san_pairwise_hier_cifar'])
def test_weights_can_be_made_after_the_meta_device(name, small_net, images):
    torch.manual_seed(0)
    model = small_net(name, device='meta').to_empty(device='cpu')
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float('nan') if tensor.is_floating_point() else 0)
    model.init_weights()
    assert model.eval()(images(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize('name', BLOCK_NETS)
def test_drop_path_and_dropout_act_in_training_alone(name, small_net, images):
    x = images(4, 3, 32, 32)
    for rate in ('drop_path_rate', 'drop_rate', 'attn_drop_rate'):
        model = small_net(name, **{rate: 0.5})
        assert not torch.allclose(model.train()(x), model(x))
        torch.testing.assert_close(model.eval()(x), model(x))


@pytest.mark.parametrize('name', TINY)
@pytest.mark.parametrize('saved,loaded', [(64, (32, 128)), ((32, 64), 64), ((16, 64), (32, 64)), ((32, 64),) * 2])
def test_another_image_size_resamples_what_is_learned(name, saved, loaded, small_net, images, tmp_path):
    """Also into grids with as many patches but another shape. timm saves the image size."""
    model, x = small_net(name, img_size=saved).eval(), images(1, 3, *to_2tuple(loaded))
    save_for_hf(model, tmp_path / 'net', safe_serialization=True)
    folder = f"local-dir:{tmp_path / 'net'}"
    if 'quadratic' not in name:
        config = timm.data.resolve_model_data_config(timm.create_model(folder, pretrained=True))
        assert config['input_size'][1:] == to_2tuple(saved)
    resized = timm.create_model(folder, pretrained=True, img_size=loaded).eval()
    if 'resvit' in name and saved != loaded:
        sides = [side // 4 for size in (loaded, saved) for side in to_2tuple(size)]
        with pytest.raises(ValueError, match='{} x {} patches.*learned for {} x {};.*set_input_size'.format(*sides)):
            model(x)
    model.set_input_size(loaded)
    torch.testing.assert_close(model(x), resized(x))


@pytest.mark.parametrize('name', TINY)
def test_attention_extract_sees_the_maps(name, small_net, images):
    """For shared attention, hooks keep the last pass and fx names the first."""
    model, x = small_net(name).eval(), images(2, 3, 32, 32)
    with explicit_maps():
        explicit = small_net(name).eval()
    explicit.load_state_dict(model.state_dict())
    torch.testing.assert_close(explicit(x), model(x))
    maps = [m.flatten(4).flatten(2, 3) for m in timm_selfconv.attention_maps(model, x)]
    net = explicit if 'resvit' in name else model  # ours make maps for hooks
    hooked, traced = AttentionExtract(net, method='hook')(x), AttentionExtract(explicit, method='fx')(x)
    assert len(maps) == 3 and len(hooked) == len(traced) == len(model.blocks)
    assert all(node.endswith('.softmax') for node in traced)
    for extracted, expected in ((hooked, maps[-len(hooked):]), (traced, maps)):
        for seen, wanted in zip(extracted.values(), expected):
            if 'resvit' in name:  # without the class token
                seen = seen[..., 1:, 1:] / seen[..., 1:, 1:].sum(-1, keepdim=True)
            torch.testing.assert_close(seen.expand(2, -1, -1, -1), wanted)


@pytest.mark.parametrize('name', NETS)
def test_layer_groups(name, small_net):
    """Groups start at the stem, as layer-wise learning rate decay requires."""
    model = small_net(name)
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert set(groups) == {n for n, _ in model.named_parameters()}
    in_order = [group for n, group in groups.items() if not n.startswith('shared')]
    assert in_order == sorted(in_order) and in_order[0] == 0 and groups['head.fc.weight'] == max(in_order)


@pytest.mark.parametrize('name', FAMILIES)
def test_chunks_of_images_change_nothing(name, images):
    """A module with a hook runs once."""
    model, x, seen = timm.create_model(name, **SHALLOW[name]).double().eval(), images(3, 3, 32, 32).double(), []
    with torch.no_grad():
        expected = model.forward_intermediates(x, indices=[0])
        with held_at_once(1):
            torch.testing.assert_close(model.forward_intermediates(x, indices=[0]), expected)
            handle = next(model.children()).register_forward_hook(lambda module, args, out: seen.append(len(out)))
            torch.testing.assert_close(model(x), model.forward_head(expected[0]))
    handle.remove()
    assert seen[-1] == 3
