"""Helpers for tests of the explorer: small nets and pictures."""
import numpy as np
import timm
import torch
from PIL import Image

SHOWN = """async ([change, query]) => {
    Object.assign(state, change);
    await net.load();
    net.show(query);
    return net.heads.map((_, i) => Array.from(net.head(i)));
}"""  # maps of all heads in a state of the explorer
SMALL = dict(embed_dim=16, mlp_dim=8, depth=2, num_heads=3, img_size=(16, 24))


def picture(seed):
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (16, 24, 3), dtype=np.uint8))


def create(name, gain=1., **kwargs):
    """Create a small net with random weights. A gain above 1 makes peaked maps in nets with content."""
    torch.manual_seed(0)
    own = name.startswith(('sa_', 'san_', 'resvit_'))
    size = (16, 24) if own else (48, 80)
    small = {} if name.startswith('san_') else SMALL if own else dict(img_size=size)
    model = timm.create_model(name, **{**small, **kwargs}).eval()
    model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, *size), crop_pct=1.)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not own and parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif key.endswith('query.weight'):
                parameter.mul_(gain)
            elif key.endswith('spreads'):
                parameter.add_(0.4 * torch.randn_like(parameter))  # precisions that couple the axes
    return model


PICTURES = {f'picture {i}': picture(i) for i in range(2)}
