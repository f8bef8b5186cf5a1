"""Checkpoints of the released code, against a plain model with its names and conventions."""
import math

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

D, SIZE, HEADS = 12, 8, (2, 3)  # 8 x 8 positions of 16 x 16 images


class ReleasedAttention(nn.Module):
    def __init__(self, kind, heads):
        super().__init__()
        self.kind, self.heads = kind, heads
        if kind.startswith('quadratic'):
            self.attention_centers = nn.Parameter(torch.randn(heads, 2))
            self.attention_spreads = nn.Parameter(
                torch.rand(heads) + 0.5 if kind == 'quadratic' else torch.randn(heads, 2, 2))
            self.register_buffer('R', torch.zeros(3))
        else:
            dim = D // 2 if kind == 'learned_content' else D
            self.row_embeddings = nn.Embedding(2 * SIZE - 1, dim)
            self.col_embeddings = nn.Embedding(2 * SIZE - 1, dim)
            self.register_buffer('relative_indices', torch.zeros(3))
            if kind == 'learned':
                self.head_keys_row = nn.Linear(dim, heads, bias=False)
                self.head_keys_col = nn.Linear(dim, heads, bias=False)
            else:
                self.query = nn.Linear(D, heads * D)
                self.key = nn.Linear(D, heads * D)
        self.value = nn.Linear(heads * D, D)

    def scores(self, x):
        """Return scores, shape (B or 1, i, j, heads, k, l): first spatial axis i and k, second j and l."""
        n = torch.arange(SIZE)
        offset = n[None, :] - n[:, None]  # key - query
        if self.kind.startswith('quadratic'):
            d = torch.stack(torch.broadcast_tensors(offset[:, None, :, None], offset[None, :, None, :]), -1).float()
            if self.kind == 'quadratic':
                inverse = (self.attention_spreads ** 2)[:, None, None] * torch.eye(2)
            else:
                inverse = self.attention_spreads @ self.attention_spreads.transpose(1, 2)
            e = d[:, :, None] - self.attention_centers[:, None, None]  # i j h k l 2
            return -0.5 * torch.einsum('ijhkla,hab,ijhklb->ijhkl', e, inverse, e)[None]
        row, col = self.row_embeddings(offset + SIZE - 1), self.col_embeddings(offset + SIZE - 1)
        if self.kind == 'learned':  # rows act on the second axis, columns on the first
            along_second = self.head_keys_row(row).permute(0, 2, 1)[None, :, :, None, :]
            along_first = self.head_keys_col(col).permute(0, 2, 1)[:, None, :, :, None]
            return (along_first + along_second)[None]
        q = self.query(x).view(-1, SIZE, SIZE, self.heads, D)
        k = self.key(x).view(-1, SIZE, SIZE, self.heads, D)
        score = torch.einsum('bijhd,bklhd->bijhkl', q, k)
        score = score + torch.einsum('bijhd,ikd->bijhk', q[..., :D // 2], row)[..., None]
        score = score + torch.einsum('bijhd,jld->bijhl', q[..., D // 2:], col)[..., None, :]
        return score / math.sqrt(D)

    def forward(self, x):
        probs = self.scores(x).flatten(-2).softmax(-1).unflatten(-1, (SIZE, SIZE)).expand(len(x), *[-1] * 5)
        return self.value(torch.einsum('bijhkl,bkld->bijhd', probs, x).flatten(3))


class ReleasedLayer(nn.Module):
    def __init__(self, kind, heads):
        super().__init__()

        def output(dim):
            return nn.ModuleDict(dict(dense=nn.Linear(dim, D), LayerNorm=nn.LayerNorm(D, eps=1e-12)))

        self.attention = nn.ModuleDict(dict(self=ReleasedAttention(kind, heads), output=output(D)))
        self.intermediate = nn.ModuleDict(dict(dense=nn.Linear(D, 20)))
        self.output = output(20)

    def forward(self, x):
        out = self.attention['output']
        x = out['LayerNorm'](out['dense'](self.attention['self'](x)) + x)
        hidden = F.gelu(self.intermediate['dense'](x))
        return self.output['LayerNorm'](self.output['dense'](hidden) + x)


class ReleasedNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.features_upscale = nn.Linear(12, D)
        self.encoder = nn.ModuleDict(dict(layer=nn.ModuleList([ReleasedLayer(kind, h) for h in HEADS])))
        self.classifier = nn.Linear(D, 10)
        self.register_buffer('attention_mask', torch.tensor(1.))

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)  # channels of a block: row in block, column in block, colour
        x = torch.cat([x[:, r::2, c::2] for r in (0, 1) for c in (0, 1)], dim=-1)
        x = self.features_upscale(x)
        for layer in self.encoder['layer']:
            x = layer(x)
        return self.classifier(x.mean((1, 2)))


KINDS = {
    'quadratic': ('sa_quadratic_cifar', {}),
    'quadratic_gen': ('sa_quadratic_gen_pruned_cifar', {}),
    'learned': ('sa_learned_cifar', dict(img_size=16)),
    'learned_content': ('sa_learned_content_cifar', dict(img_size=16)),
}
SMALL = dict(embed_dim=D, mlp_dim=20, depth=2, num_heads=HEADS)


@pytest.mark.parametrize('kind', KINDS)
def test_released_checkpoints_give_their_logits_and_adapt(kind, tmp_path):
    """Flat or under a key; and other classes, channels and sizes load."""
    torch.manual_seed(0)
    name, kwargs = KINDS[kind]
    net, x = ReleasedNet(kind).eval(), torch.randn(3, 3, 16, 16)
    state_dict, logits = net.state_dict(), net(x)

    def load(checkpoint, **more):
        torch.save(checkpoint, tmp_path / 'best.pth')
        overlay = dict(file=str(tmp_path / 'best.pth'))
        return timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **{**SMALL, **kwargs, **more}).eval()

    for checkpoint in (state_dict, dict(model_state_dict=state_dict, epoch=300)):
        torch.testing.assert_close(load(checkpoint)(x), logits, rtol=1e-4, atol=1e-4)
    model = load(state_dict, img_size=24, num_classes=4, in_chans=1)
    assert model(torch.randn(2, 1, 24, 24)).shape == (2, 4)
    with pytest.raises(ValueError, match=r'num_heads=\(2, 2\).*\(2, 3\) heads per layer'):
        load(state_dict, num_heads=2)
    with pytest.raises(RuntimeError, match='size mismatch'):  # another width, not twice as many heads
        load(state_dict, embed_dim=D // 2)
