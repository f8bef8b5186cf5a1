import pytest
import torch


@pytest.mark.parametrize('name', ['resvit_cifar', 'resvit_hier_cifar'])
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
