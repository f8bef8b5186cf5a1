"""Commands that evaluate and transform nets: eval, include, prune. `train` runs in the commands that include prints."""
import json
import shlex

import pytest
import timm
import torch
from timm.models import save_for_hf

from pictures import fill
from timm_selfconv.cli import main
from timm_selfconv.measure import counting
from timm_selfconv.models import CIFAR10_CLASSES
from timm_selfconv.theory import prune_heads

SMALL = dict(embed_dim=8, mlp_dim=8, patch_size=8)


def test_eval(checkpoint, named, capsys):
    command = ['eval', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', named]
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['images'] == 10 and set(result['per_class'].values()) <= {0., 1.}
    main(command)
    out = capsys.readouterr().out
    assert f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f} on 10 images" in out and 'airplane' in out


def printed(out):
    """Return the lines that a command prints after `Use it` and `Train it`."""
    return [line.split(':', 1)[1].strip() for line in out.splitlines() if line.startswith(('Use it:', 'Train it:'))]


def check_training(line, pictures, folder, model):
    """Run the printed command at a tiny learning rate, and compare the weights."""
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ('timm-selfconv', 'train')
    main([command, *arguments, '--data', str(pictures.parent), '--device', 'cpu', 'train_split=test', 'val_split=test',
          'batch_size=2', 'epochs=1', 'warmup_epochs=0', 'lr=1e-9'])
    trained = torch.load(f'{folder}-trained/last.pth.tar', weights_only=False)['state_dict']
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=1e-6)


@pytest.fixture
def degenerate(tmp_path):
    """Weights of a general quadratic net with a flat head in layer 0 and a stripe in layer 1."""
    model = timm.create_model('sa_quadratic_gen_cifar', depth=2, num_heads=4, **SMALL)
    with torch.no_grad():
        model.blocks[0].attn.encoding.spreads[3] = 1e-4 * torch.eye(2)
        model.blocks[1].attn.encoding.spreads[0] = torch.tensor([[1., 0.], [0., 1e-4]])
    save_for_hf(model, tmp_path / 'net', safe_serialization=True)
    return f"local-dir:{tmp_path / 'net'}"


def test_prune(degenerate, tmp_path, capsys, refused):
    command = ['prune', degenerate, '--output', str(tmp_path / 'out' / 'pruned')]
    main(command)
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()[2:4]] == [['0', '3', '1e-08', '1'], ['1', '0', '1', '1e+08']]
    full = timm.create_model(degenerate, pretrained=True).eval()
    pruned = prune_heads(full, {0: [3], 1: [0]})
    counts = counting.count(pruned)
    assert all(f'{n:,}' in out for n in (counts.parameters, counts.linear_conv_flops, counts.flops))

    use, train = printed(out)
    loaded = eval(use, dict(timm=timm)).eval()
    assert loaded.num_heads == (3, 3)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded(x), pruned(x), rtol=0, atol=0)
    refused('exists', command)
    assert sorted(path.name for path in (tmp_path / 'out' / 'pruned').iterdir()) == ['config.json', 'model.safetensors']
    assert '"attn_drop_rate": 0.1' in train  # the recipe's
    check_training(train, fill(tmp_path / 'data' / 'test', CIFAR10_CLASSES), tmp_path / 'out' / 'pruned', loaded)


def test_include_and_what_it_says_trains_on(tmp_path, capsys, refused):
    source = timm.create_model('sa_quadratic_cifar', num_heads=4, num_classes=4, **SMALL).eval()
    save_for_hf(source, tmp_path / 'net', safe_serialization=True)
    fill(tmp_path / 'data' / 'test', range(4))
    net, output = f"local-dir:{tmp_path / 'net'}", str(tmp_path / 'rich')
    include = ['include', net, 'sa_learned_content_cifar', '--output', output]
    main(include)
    use, train = printed(capsys.readouterr().out)
    rich = eval(use, dict(timm=timm)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(rich(x), source(x), rtol=1e-4, atol=1e-4)
    main(['heads', f"local-dir:{tmp_path / 'rich'}", '--images', str(tmp_path / 'data' / 'test' / '1' / '0.png')])
    assert 'residual' in capsys.readouterr().out

    check_training(train, tmp_path / 'data' / 'test', output, rich)
    capsys.readouterr()
    refused('exists', include)
    refused('cannot express the attention', [
        'include', f"local-dir:{tmp_path / 'rich'}", 'sa_quadratic_cifar', '--output', tmp_path / 'poor'])
    assert not (tmp_path / 'poor').exists()


def test_prune_named_heads(degenerate, little, tmp_path, refused):
    output = ['--output', str(tmp_path / 'pruned')]
    refused('nothing to prune', ['prune', little, *output])
    main(['prune', degenerate, *output, '--heads', '0:1,2', '1:0'])
    assert timm.create_model(f"local-dir:{tmp_path / 'pruned'}", pretrained=True).num_heads == (2, 3)
