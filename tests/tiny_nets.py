"""Small nets of every family, and layers with every kind of attention."""
import contextlib
import itertools

import timm
import torch
from timm.layers import set_fused_attn

from timm_selfconv.layers import ABSOLUTE, RELATIVE, TERMS
from timm_selfconv.models import SelfAttentionNet

# encoding and terms of every kind of attention
EVERY_KIND = [
    *((encoding, terms) for encoding in RELATIVE for n in range(1, 5) for terms in itertools.combinations(TERMS, n)),
    *((encoding, ('content',)) for encoding in ABSOLUTE)]


def noise(*shape, dtype=torch.float64, seed=1):
    """Make noise, the same in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def randomised(module, seed=0, std=0.7):
    """Set random parameters that are neither near zero nor symmetric, in eval mode."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module.eval()


def random_net(encoding='quadratic', terms=('position',), num_heads=4, seed=0, std=0.7, **kwargs):
    """Make a net in float64 with random parameters."""
    small = dict(img_size=8, embed_dim=8, mlp_dim=12, depth=2, dtype=torch.float64)
    net = SelfAttentionNet(encoding=encoding, terms=terms, num_heads=num_heads, **{**small, **kwargs})
    return randomised(net, seed, std)


@contextlib.contextmanager
def explicit_maps():
    """Make nets with explicit attention maps, by timm's own switch."""
    set_fused_attn(False)
    try:
        yield
    finally:
        set_fused_attn(True)


NARROW = dict(embed_dim=8, mlp_dim=8, depth=2)
SMALL = f'model_kwargs={NARROW}'  # as a key of a recipe


def small_sizes(name):
    """Return keywords that make a net of the zoo narrow and shallow."""
    if name.startswith('san_'):
        return dict(channels=(32,) * 4)
    if name.startswith('resnet'):
        return dict(channels=(8,) * 4)
    stem = dict(stem_dim=4) if name.startswith('resvit_') else {}
    return dict(embed_dim=16, mlp_dim=24, depth=3, num_heads=2, **stem)


# every family and layer, shallow
ONE_LAYER = dict(NARROW, depth=1)
TWO_STAGES = dict(channels=(32,) * 2, depths=(1,) * 2)
SHALLOW = {
    **{f'sa_{kind}_cifar': ONE_LAYER for kind in ('quadratic', 'quadratic_gen', 'learned', 'learned_content')},
    'resvit_cifar': ONE_LAYER,
    **{f'{kind}_hier_cifar': NARROW for kind in ('sa_learned_content', 'resvit')},
    **{f'san_{kind}_cifar': TWO_STAGES for kind in ('pairwise', 'patchwise', 'pairwise_hier', 'patchwise_hier')},
    'resnet_tiny_cifar': dict(layers=(1,) * 4, channels=(8,) * 4),
}
# one net per class and formula
FAMILIES = (
    'sa_quadratic_cifar', 'sa_quadratic_gen_cifar', 'sa_learned_content_hier_cifar', 'resvit_hier_cifar',
    'san_pairwise_hier_cifar', 'san_patchwise_cifar')


def shallow_net(name, **kwargs):
    """Make a net of SHALLOW in float64 and eval mode. Its norms and biases keep features away from the kink of ReLU."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SHALLOW[name], **kwargs}).double().eval()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1., 0.3)
    return model
