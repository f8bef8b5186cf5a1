"""Attention maps of timm's transformers."""
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch.overrides import TorchFunctionMode

from tiny_nets import randomised
from timm_selfconv.look.attention_maps import attention_layers, attention_maps, class_attention, has_class_token, \
    look_at_windows
from timm_selfconv.look.transformers import WINDOW_BLOCKS, read_probs
from timm_selfconv.models import zoo_names

VIT = dict(img_size=(48, 64), embed_dim=24, depth=1, num_heads=3)
SWIN = dict(img_size=(48, 80), embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=4)
# one small net for each kind of attention
READ = {
    **dict.fromkeys((
        'beit_base_patch16_224', 'cait_xxs24_224', 'deit_tiny_distilled_patch16_224', 'naflexvit_base_patch16_gap',
        'vit_base_patch16_xp_224', 'vit_small_patch16_rope_mixed_224', 'vit_tiny_patch16_224'), VIT),
    **dict.fromkeys(('swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256', 'swinv2_cr_tiny_224'), SWIN),
    **{name: {} for name in ('test_coatnet', 'test_maxvit', 'test_vit_relpos')},
    'convit_tiny': dict(img_size=48, embed_dim=8, depth=2, local_up_to_layer=1),
    'deepseek_vit_412m': dict(img_size=84, embed_dim=32, depth=1, num_heads=2),
    'eva02_tiny_patch14_224': dict(VIT, img_size=(42, 56)),
    'fastvit_mci0': dict(layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 32)),
    'gcvit_xxtiny': dict(img_size=(64, 96)),
    'qwen3_vit_88m_enc': dict(img_size=64, embed_dim=32, depth=1, num_heads=2),
    'samvit_base_patch16_224': dict(
        img_size=80, embed_dim=24, depth=2, num_heads=3, window_size=3, global_attn_indexes=(1,)),
    'visformer_tiny': dict(img_size=(64, 96), init_channels=16, embed_dim=48, depth=(1, 1, 1), num_heads=3),
    'vit_tiny_r_s16_p8_224': dict(VIT, img_size=64),
    'vitamin_small_224': dict(img_size=(32, 48), depth=1),
    'resvit_cifar': dict(img_size=(8, 12), embed_dim=16, mlp_dim=8, depth=1, num_heads=2),
    'resvit_hier_cifar': dict(img_size=(8, 12), embed_dim=16, mlp_dim=8, depth=2, num_heads=2),
    'vit_base_patch16_clip_224': dict(VIT, qk_norm=True, reg_tokens=2),
    'vit_small_patch16_224': dict(VIT, class_token=False, global_pool='avg'),
}
REFUSED = (
    'botnet26t_256', 'halonet26t', 'lambda_resnet26t', 'coat_tiny', 'cpubone_nano', 'crossvit_tiny_240', 'csatv2',
    'davit_tiny', 'edgenext_xx_small', 'efficientformer_l1', 'efficientformerv2_s0', 'efficientvit_b0',
    'efficientvit_m0', 'gemma4_vit_167m', 'hiera_tiny_224', 'sam2_hiera_tiny', 'iformer_t', 'levit_128s',
    'lowformer_b0', 'caformer_s18', 'mobilenetv4_hybrid_medium', 'mobilenetv5_base', 'mobilevit_xxs',
    'mobilevitv2_050', 'mvitv2_tiny', 'nest_tiny', 'nextvit_small', 'pit_ti_224', 'pvt_v2_b0', 'shvit_s1',
    'tiny_vit_5m_224', 'tnt_s_patch16_224', 'twins_svt_small', 'vit_dlittle_patch16_reg1_gap_256',
    'vit_dpwee_patch16_reg1_gap_256', 'volo_d1_224', 'xcit_nano_12_p8_224')


class Softmaxes(TorchFunctionMode):
    """Records all outputs of softmax, and the softmax of the fused kernel from queries and keys, in float64."""
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, *_ = (x.double() for x in args)
            scores = query @ key.mT * kwargs.get('scale', 1 / math.sqrt(query.shape[-1]))
            mask = kwargs.get('attn_mask')
            self.seen.append((scores if mask is None else scores + mask).softmax(-1))
        out = func(*args, **kwargs)
        if func in (torch.Tensor.softmax, F.softmax):
            self.seen.append(out.double())
        return out


def tiny(name):
    """Make a net without flat maps, and two images."""
    model = randomised(timm.create_model(name, **READ[name]), std=0.3)  # some parameters start at 0 or nearly 0
    size = to_2tuple(READ[name].get('img_size', model.pretrained_cfg['input_size'][1:]))
    return model, torch.randn(2, 3, *size)


@pytest.mark.parametrize('name', [name for name in READ if name != 'convit_tiny'])  # its two are added up
def test_maps_equal_the_output_of_softmax(name):
    """With the fused kernel enabled, if the net has one."""
    model, images = tiny(name)
    with Softmaxes() as softmaxes, torch.no_grad():
        model(images)
    layers = read_probs(model, images, lambda probs: probs)
    expected = iter(softmaxes.seen)
    for layer in layers:
        probs = layer.probs.flatten()
        theirs = next(p for p in expected if p.numel() == probs.numel() and p.shape[-2:] == layer.probs.shape[-2:])
        torch.testing.assert_close(probs.double(), theirs.flatten(), rtol=1e-4, atol=1e-6)
    assert max(float(layer.probs.std()) * layer.probs.shape[-1] for layer in layers) > 0.02  # of uniform maps 0
    for maps in attention_maps(model, images):
        torch.testing.assert_close(maps.sum((-2, -1)), torch.ones(maps.shape[:4]))
    if has_class_token(model):
        token = class_attention(model, images)
        assert len(token) == (2 if name.startswith('cait') else len(layers))
        for maps, probs in zip(token[::-1], softmaxes.seen[::-1]):
            expected = F.normalize(probs[:, :, 0, -maps[0, 0].numel():], p=1, dim=-1).view(maps.shape)
            torch.testing.assert_close(maps.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'eva02_tiny_patch14_224', 'naflexvit_base_patch16_gap'])
def test_tokens_lie_row_by_row(name):
    """A change in one patch of the image changes the token of this patch."""
    model, images = tiny(name)
    patch, seen = torch.zeros(attention_maps(model, images)[0].shape[-2:]), []
    patch[-1, 1] = 1
    attention_layers(model)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(images), model(images + F.interpolate(patch[None, None], images.shape[-2:]))
    moved = (seen[1] - seen[0]).flatten(1, -2).norm(dim=-1)[0, -patch.numel():]
    assert moved.argmax() == patch.argmax()


@pytest.mark.parametrize('name', [
    'swin_tiny_patch4_window7_224', 'swinv2_cr_tiny_224', 'samvit_base_patch16_224',
    'gcvit_xxtiny', 'test_maxvit'])
def test_windows_lie_where_their_pixels_meet(name):
    """A change of one input pixel of a block changes the output pixels that attend to it."""
    model, images = (given.double() for given in tiny(name))
    inputs = []
    for block in [m for m in model.modules() if isinstance(m, WINDOW_BLOCKS)]:
        block.register_forward_pre_hook(lambda block, args: inputs.append((block, *args)))
    with torch.no_grad():
        model(images[:1])
        for maps, (block, x, *args) in zip(attention_maps(model, images[:1]), inputs[:]):
            height, width = maps.shape[-2:]
            for row, col in {(0, 0), (height // 2, width // 2), (height - 1, 1), (min(2, height - 1), width - 2)}:
                changed = x.clone()
                changed[0, row, col] += torch.randn(x.shape[-1])
                moved = (block(changed, *args) - block(x, *args))[0].abs().amax(-1) > 1e-14
                assert torch.equal(moved, maps[0, :, :, :, row, col].amax(0) > 1e-12)  # masks are exp(-100)


def test_shifted_windows_look_where_their_biases_say():
    """A table of biases moves heads one row down and two columns left, if that pixel is in the window."""
    model, images = tiny('swin_tiny_patch4_window7_224')
    for layer in attention_layers(model):
        torch.nn.init.zeros_(layer.qkv.weight)
        torch.nn.init.zeros_(layer.relative_position_bias_table)
        layer.relative_position_bias_table.data.view(7, 7, -1)[3 - 1, 3 + 2] = 50.  # query - key
    plain, shifted, *_ = attention_maps(model, images)
    rows, cols = torch.arange(11)[:, None], torch.arange(2, 20)
    for maps, shift in ((plain, 0), (shifted, 2)):
        there = maps[0, :, rows, cols, rows + 1, cols - 2] > 0.99
        together = [(a - shift) // 4 == (b - shift) // 4 for a, b in ((rows, rows + 1), (cols, cols - 2))]
        assert torch.equal(there, (together[0] & together[1]).expand_as(there))
    plain, shifted, *_ = look_at_windows(model, images, lambda maps: maps)
    assert plain.shape == (2, 15, 2, 4, 4, 4, 4) and shifted.shape == (2, 8, 2, 4, 4, 4, 4)  # 2 x 4 are whole
    assert (shifted[:, :, :, :3, 2:, 1:, :2].diagonal(0, 3, 5).diagonal(0, 3, 4) > 0.99).all()


def test_padding_is_left_out_and_what_is_left_sums_to_1():
    """With 5 x 5 patches in windows of 3 x 3, only the first of four windows is complete."""
    model, images = tiny('samvit_base_patch16_224')
    whole, parts = attention_maps(model, images)[0], look_at_windows(model, images, lambda maps: maps)[0]
    assert whole.shape == (2, 3, 5, 5, 5, 5) and parts.shape == (2, 1, 3, 3, 3, 3, 3)
    torch.testing.assert_close(parts[:, 0], whole[:, :, :3, :3, :3, :3])
    assert whole[:, :, 0, 0, 3:].abs().max() == 0 and whole[:, :, 4, 4, 3:, 3:].sum((-2, -1)).min() > 0.999


def test_nets_without_a_class_token_and_other_numbers_of_tokens_are_refused():
    with pytest.raises(ValueError, match='has no class token'):
        class_attention(*tiny('swin_tiny_patch4_window7_224'))
    model, images = tiny('vit_tiny_patch16_224')
    model.num_prefix_tokens = 2
    with pytest.raises(ValueError, match='and 3 x 4 patches as the last tokens'):
        attention_maps(model, images)


def module(name):
    return timm.models._registry._model_to_module[name]


@pytest.mark.slow
def test_the_chapter_and_these_lists_name_all_of_timms_modules_with_attention(repo):
    """Of each other module, the first net has no attention."""
    read, _, refused = (repo / 'timm_selfconv' / 'look' / 'README.md').read_text().partition('- Not supported:')
    for names, text in ((READ.keys() - zoo_names(), read), (REFUSED, refused)):
        assert [name for name in names if f'`{module(name)}`' not in text] == []
    known = {module(name) for name in (*READ, *REFUSED, *zoo_names())}
    others = [next(name for name in timm.list_models() if module(name) == where)
              for where in sorted(set(timm.list_modules()) - known)]
    for name in (*REFUSED, *others):
        with torch.device('meta'):
            model = timm.create_model(name)
            images = torch.randn(1, *model.pretrained_cfg['input_size'])
        with pytest.raises(ValueError, match='has no attention maps' if name in others else r'^model=\w+: '):
            attention_maps(model, images)
