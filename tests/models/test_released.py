"""Checkpoints of the released code, against its formulas with its names and conventions."""
import pytest
import timm
import torch
import torch.nn.functional as F

D, MLP, SIZE, HEADS = 12, 20, 8, (2, 3)  # 8 x 8 positions of 16 x 16 images


def checkpoint(kind):
    """Random weights by the names of the released code."""
    torch.manual_seed(0)
    shapes = {'features_upscale': (D, 12), 'classifier': (10, D)}
    state = dict(attention_mask=torch.tensor(1.))
    for i, heads in enumerate(HEADS):
        layer, own = f'encoder.layer.{i}.', f'encoder.layer.{i}.attention.self.'
        if kind == 'learned_content':
            shapes.update({own + 'query': (heads * D, D), own + 'key': (heads * D, D)})
        shapes.update({own + 'value': (D, heads * D), f'{layer}attention.output.dense': (D, D)})
        shapes.update({f'{layer}intermediate.dense': (MLP, D), f'{layer}output.dense': (D, MLP)})
        for norm in (f'{layer}attention.output.LayerNorm', f'{layer}output.LayerNorm'):
            state |= {f'{norm}.weight': torch.rand(D) + 0.5, f'{norm}.bias': torch.randn(D)}
        if kind.startswith('quadratic'):
            spreads = torch.rand(heads) + 0.5 if kind == 'quadratic' else torch.randn(heads, 2, 2)
            state.update({own + 'attention_centers': torch.randn(heads, 2), own + 'attention_spreads': spreads})
        else:
            dim = D // 2 if kind == 'learned_content' else D
            for axis in ('row', 'col'):
                state[f'{own}{axis}_embeddings.weight'] = torch.randn(2 * SIZE - 1, dim)
                if kind == 'learned':
                    state[f'{own}head_keys_{axis}.weight'] = torch.randn(heads, dim) / dim ** 0.5
        state[own + 'R'] = state[own + 'relative_indices'] = torch.zeros(3)  # not used
    for name, shape in shapes.items():
        state.update({f'{name}.weight': torch.randn(shape) / shape[1] ** 0.5, f'{name}.bias': torch.randn(shape[0])})
    return state


def apply(state, name, x):
    """Apply a Linear, or else a LayerNorm."""
    weight, bias = state[f'{name}.weight'], state[f'{name}.bias']
    return F.linear(x, weight, bias) if weight.dim() == 2 else F.layer_norm(x, (D,), weight, bias, 1e-12)


def scores(state, own, kind, heads, x):
    """Return scores, shape (B or 1, i, j, heads, k, l): first spatial axis i and k, second j and l."""
    n = torch.arange(SIZE)
    offset = n[None, :] - n[:, None]  # key - query
    if kind.startswith('quadratic'):
        spreads = state[own + 'attention_spreads']
        d = torch.stack(torch.broadcast_tensors(offset[:, None, :, None], offset[None, :, None, :]), -1).float()
        root = spreads[:, None, None] * torch.eye(2) if kind == 'quadratic' else spreads
        e = d[:, :, None] - state[own + 'attention_centers'][:, None, None]  # i j h k l 2
        return -0.5 * torch.einsum('ijhkla,hab,ijhklb->ijhkl', e, root @ root.mT, e)[None]
    row, col = (state[f'{own}{axis}_embeddings.weight'][offset + SIZE - 1] for axis in ('row', 'col'))
    if kind == 'learned':  # rows act on the second axis, columns on the first
        along_second = torch.einsum('jld,hd->jhl', row, state[f'{own}head_keys_row.weight'])
        along_first = torch.einsum('ikd,hd->ihk', col, state[f'{own}head_keys_col.weight'])
        return (along_first[:, None, :, :, None] + along_second[None, :, :, None])[None]
    q, k = (apply(state, own + name, x).view(-1, SIZE, SIZE, heads, D) for name in ('query', 'key'))
    score = torch.einsum('bijhd,bklhd->bijhkl', q, k)
    score = score + torch.einsum('bijhd,ikd->bijhk', q[..., :D // 2], row)[..., None]
    return (score + torch.einsum('bijhd,jld->bijhl', q[..., D // 2:], col)[..., None, :]) / D ** 0.5


def released_logits(state, kind, x):
    x = x.permute(0, 2, 3, 1)  # channels of a block: row in block, column in block, colour
    x = torch.cat([x[:, r::2, c::2] for r in (0, 1) for c in (0, 1)], dim=-1)
    x = apply(state, 'features_upscale', x)
    for i, heads in enumerate(HEADS):
        layer = f'encoder.layer.{i}.'
        probs = scores(state, f'{layer}attention.self.', kind, heads, x).flatten(-2).softmax(-1)
        gathered = (probs @ x.flatten(1, 2)[:, None, None]).flatten(3)
        out = apply(state, f'{layer}attention.output.dense', apply(state, f'{layer}attention.self.value', gathered))
        x = apply(state, f'{layer}attention.output.LayerNorm', out + x)
        hidden = F.gelu(apply(state, f'{layer}intermediate.dense', x))
        x = apply(state, f'{layer}output.LayerNorm', apply(state, f'{layer}output.dense', hidden) + x)
    return apply(state, 'classifier', x.mean((1, 2)))


@pytest.mark.parametrize('kind', ['quadratic', 'quadratic_gen', 'learned', 'learned_content'])
def test_released_checkpoints_give_their_logits_and_adapt(kind, tmp_path):
    """Flat or under a key; and other classes, channels and sizes load."""
    state, x = checkpoint(kind), torch.randn(3, 3, 16, 16)

    def load(state, **more):
        torch.save(state, tmp_path / 'best.pth')
        small = dict(img_size=16, embed_dim=D, mlp_dim=MLP, depth=2, num_heads=HEADS)
        overlay = dict(file=str(tmp_path / 'best.pth'))
        return timm.create_model(
            f'sa_{kind}_cifar', pretrained=True, pretrained_cfg_overlay=overlay, **{**small, **more}).eval()

    for saved in (state, dict(model_state_dict=state, epoch=300)):
        torch.testing.assert_close(load(saved)(x), released_logits(state, kind, x), rtol=1e-4, atol=1e-4)
    model = load(state, img_size=24, num_classes=4, in_chans=1)
    assert model(torch.randn(2, 1, 24, 24)).shape == (2, 4)
    with pytest.raises(ValueError, match=r'num_heads=\(2, 2\).*\(2, 3\) heads per layer'):
        load(state, num_heads=2)
    with pytest.raises(RuntimeError, match='size mismatch'):  # another width, not twice as many heads
        load(state, embed_dim=D // 2)
