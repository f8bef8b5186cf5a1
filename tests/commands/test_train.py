"""Commands that evaluate and transform nets: eval, include, prune. `train` runs in the commands that include prints."""
import json
import shlex

import timm
import torch
from timm.models import save_for_hf

from pictures import fill
from timm_selfconv.cli import main
from timm_selfconv.measure import counting
from timm_selfconv.theory import prune_heads

SMALL = dict(embed_dim=8, mlp_dim=8, patch_size=8)


def test_eval(checkpoint, folder, output_of):
    command = ['eval', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder]
    result = json.loads(output_of(*command, '--json'))
    assert result['images'] == 10 and set(result['per_class'].values()) <= {0., 1.}
    out = output_of(*command)
    assert f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f} on 10 images" in out and 'airplane' in out


def printed(out):
    """Return the lines that a command prints after `Use it` and `Train it`."""
    return [line.split(':', 1)[1].strip() for line in out.splitlines() if line.startswith(('Use it:', 'Train it:'))]


def check_training(line, data, folder, model):
    """Run the printed command at a tiny learning rate, and compare the weights."""
    assert line.startswith('timm-selfconv train ')
    main([*shlex.split(line)[1:], '--data', str(data), '--device', 'cpu', 'train_split=test', 'val_split=test',
          'batch_size=2', 'epochs=1', 'warmup_epochs=0', 'lr=1e-9'])
    trained = torch.load(f'{folder}-trained/last.pth.tar', weights_only=False)['state_dict']
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=1e-6)


def test_prune(little, folder, tmp_path, output_of, refused):
    full = timm.create_model('sa_quadratic_gen_cifar', depth=2, num_heads=4, **SMALL).eval()
    with torch.no_grad():
        full.blocks[0].attn.encoding.spreads[3] = 1e-4 * torch.eye(2)  # a flat head
        full.blocks[1].attn.encoding.spreads[0] = torch.tensor([[1., 0.], [0., 1e-4]])  # a stripe
    save_for_hf(full, tmp_path / 'net', safe_serialization=True)
    net, output = f"local-dir:{tmp_path / 'net'}", tmp_path / 'out' / 'pruned'
    command = ['prune', net, '--output', output]
    out = output_of(*command)
    assert [line.split() for line in out.splitlines()[2:4]] == [['0', '3', '1e-08', '1'], ['1', '0', '1', '1e+08']]
    pruned = prune_heads(full, {0: [3], 1: [0]})
    counts = counting.count(pruned)
    assert all(f'{n:,}' in out for n in (counts.parameters, counts.linear_conv_flops, counts.flops))

    use, train = printed(out)
    loaded = eval(use, dict(timm=timm)).eval()
    assert loaded.num_heads == (3, 3)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded(x), pruned(x), rtol=0, atol=0)
    refused('exists', command)
    assert sorted(path.name for path in output.iterdir()) == ['config.json', 'model.safetensors']
    assert '"attn_drop_rate": 0.1' in train  # the recipe's
    check_training(train, folder, output, loaded)

    named = tmp_path / 'named'
    output_of('prune', net, '--output', named, '--heads', '0:1,2', '1:0')
    assert timm.create_model(f'local-dir:{named}', pretrained=True).num_heads == (2, 3)
    refused('nothing to prune', ['prune', little, '--output', tmp_path / 'other'])


def test_include_and_what_it_says_trains_on(tmp_path, output_of, refused):
    source = timm.create_model('sa_quadratic_cifar', num_heads=4, num_classes=4, **SMALL).eval()
    save_for_hf(source, tmp_path / 'net', safe_serialization=True)
    pictures, output = fill(tmp_path / 'data' / 'test', range(4)), tmp_path / 'rich'
    include = ['include', f"local-dir:{tmp_path / 'net'}", 'sa_learned_content_cifar', '--output', output]
    use, train = printed(output_of(*include))
    rich = eval(use, dict(timm=timm)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(rich(x), source(x), rtol=1e-4, atol=1e-4)
    assert 'residual' in output_of('heads', f'local-dir:{output}', '--images', pictures / '1' / '0.png')

    check_training(train, pictures.parent, output, rich)
    refused('exists', include)
    refused('cannot express the attention', [
        'include', f'local-dir:{output}', 'sa_quadratic_cifar', '--output', tmp_path / 'poor'])
    assert not (tmp_path / 'poor').exists()
