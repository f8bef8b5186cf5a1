import pytest
import timm
import torch
from timm.layers import to_2tuple
from timm.models import save_for_hf

NAMES = ['resvit_cifar', 'resvit_hier_cifar']


@pytest.mark.parametrize('name', NAMES)
def test_the_net_by_hand(name, small_net, images):
    """The definition from its weights, head by head. Features carry the class token, intermediates do not."""
    model = small_net(name, img_size=(8, 12)).double().eval()
    with torch.no_grad():
        model.patch_embed.bias.normal_()
    x = images(2, 3, 8, 12).double()
    out, (features, (last,)) = model(x), model.forward_intermediates(x, 1, output_fmt='NHWC')

    x = model.layer1(model.bn1(model.conv1(x)).relu())
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(2, 24, 16)
    patches = torch.cat([torch.zeros(2, 1, 16).double(), patches], 1)  # the class token is a patch of zeros
    x = patches @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias + model.pos_embed
    first = None
    for i in range(3):
        block = model.blocks[0 if 'hier' in name else i]
        normed = torch.nn.functional.layer_norm(x, (16,), block.norm1.weight, block.norm1.bias)
        first = normed if first is None or 'hier' not in name else first
        attended = block.attn.proj.bias
        for h in range(2):
            rows = slice(16 * h, 16 * h + 16)
            scores = (normed @ block.attn.query.weight[rows].T) @ (first @ block.attn.key.weight[rows].T).mT / 4
            head = scores.softmax(-1) @ (normed @ block.attn.value.weight[rows].T)
            attended = attended + head @ block.attn.proj.weight[:, rows].T
        x = x + attended
        x = x + block.mlp.fc2(torch.nn.functional.gelu(block.mlp.fc1(block.norm2(x))))
    torch.testing.assert_close(out, model.head.fc(x.mean(1)))
    torch.testing.assert_close(features.mean((1, 2)), x.mean(1))
    torch.testing.assert_close(last.flatten(1, 2), x[:, 1:])


@pytest.mark.parametrize('saved,loaded', [(64, (32, 128)), ((32, 64), 64), ((16, 64), (32, 64)), ((32, 64),) * 2])
def test_positions_load_into_another_size_as_they_are_resampled(saved, loaded, small_net, tmp_path):
    """Also into grids with as many patches but another shape. timm saves the image size."""
    net = small_net('resvit_cifar', img_size=saved)
    save_for_hf(net, tmp_path / 'net', safe_serialization=True)
    folder = f"local-dir:{tmp_path / 'net'}"
    same = timm.create_model(folder, pretrained=True)
    assert timm.data.resolve_model_data_config(same)['input_size'][1:] == to_2tuple(saved)
    found = timm.create_model(folder, pretrained=True, img_size=loaded)
    net.set_input_size(loaded)
    torch.testing.assert_close(found.state_dict(), net.state_dict())
