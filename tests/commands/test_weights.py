"""Files of weights: export, include, prune."""
import dataclasses
import json
import os
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import yaml
from timm.models import save_for_hf

from pictures import fill, save_parquet
from timm_selfconv.cli import main
from timm_selfconv.data import open_images, preprocess
from timm_selfconv.measure import counting
from timm_selfconv.theory import merge_heads, prune_heads
from timm_selfconv.training.recipes import RECIPES

SMALL = dict(embed_dim=8, mlp_dim=8, patch_size=8)


@pytest.mark.parametrize('name', ['sa_quadratic_tiny_cifar', 'sa_quadratic_tiny_cifar.from_another_net'])
def test_export_writes_what_it_measured_and_nothing_twice(name, checkpoint, folder, tmp_path, refused, monkeypatch):
    command = ['export', name, '--checkpoint', checkpoint, '--data', folder,
               '--output', str(tmp_path / 'out'), '--fact', 'seed=42', '--fact', 'recipe=a=b']
    main(command)
    card = (tmp_path / 'out' / f'{name}.md').read_text()
    assert '| seed | 42 |' in card and '| recipe | a=b |' in card
    assert '(10 images of the test split of data, from this file' in card and 'CIFAR-10' not in card

    monkeypatch.chdir(tmp_path / 'out')  # the card's snippet loads that very file
    scope = {}
    exec(card.split('```python')[1].split('```')[0], scope)
    saved = safetensors.torch.load_file(f'{name}.safetensors')
    loaded = {key: value.to(saved[key].dtype) for key, value in scope['model'].state_dict().items()}
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    refused('exists', command)
    assert (tmp_path / 'out' / f'{name}.md').read_text() == card


def test_a_card_where_weights_ship_loads_them_by_name(checkpoint, folder, tmp_path):
    output = tmp_path / 'timm_selfconv' / 'weights'
    main(['export', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder, '--output', str(output)])
    snippet = "create_model('sa_quadratic_tiny_cifar.cifar10', pretrained=True).eval()"
    assert snippet in next(output.glob('*.md')).read_text()


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
    assert [line.split()[:2] for line in out.splitlines() if 'alike' in line or 'stripe' in line] == [
        ['0', '3'], ['1', '0']]
    assert '1e-08' in out and '1e+08' in out
    full = timm.create_model(degenerate, pretrained=True).eval()
    pruned = prune_heads(full, {0: [3], 1: [0]})
    for counts in (counting.count(full), counting.count(pruned)):
        assert all(f'{n:,}' in out for n in (counts.parameters, counts.linear_conv_flops, counts.flops))

    scope = dict(timm=timm)
    loaded = eval(next(line for line in out.splitlines() if line.startswith('Use it')).split(':', 1)[1].strip(), scope)
    assert loaded.num_heads == (3, 3)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded.eval()(x), pruned(x), rtol=0, atol=0)

    refused('exists', command)
    files = [path.name for path in (tmp_path / 'out').rglob('*') if path.is_file()]
    assert sorted(files) == ['config.json', 'model.safetensors']


def test_include_and_what_it_says_trains_on(tmp_path, capsys, refused):
    source = timm.create_model('sa_quadratic_cifar', num_heads=4, num_classes=4, **SMALL).eval()
    save_for_hf(source, tmp_path / 'net', safe_serialization=True)
    fill(tmp_path / 'data' / 'test', range(4))
    net, output = f"local-dir:{tmp_path / 'net'}", str(tmp_path / 'rich')
    include = ['include', net, 'sa_learned_content_cifar', '--output', output]
    main(include)
    use, line = (line.split(':', 1)[1].strip() for line in capsys.readouterr().out.splitlines())
    rich = eval(use, dict(timm=timm)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(rich(x), source(x), rtol=1e-4, atol=1e-4)
    main(['heads', f"local-dir:{tmp_path / 'rich'}", '--images', str(tmp_path / 'data' / 'test' / '1' / '0.png')])
    assert 'residual' in capsys.readouterr().out

    program, command, *arguments = shlex.split(line)
    assert (program, command) == ('timm-selfconv', 'train')
    main([command, *arguments, '--data', str(tmp_path / 'data'), '--device', 'cpu',
                'train_split=test', 'batch_size=2', 'epochs=1', 'warmup_epochs=0', 'lr=1e-9'])
    trained = torch.load(tmp_path / 'rich-trained' / 'last.pth.tar', weights_only=False)['state_dict']
    torch.testing.assert_close(trained, dict(rich.state_dict()), rtol=0, atol=1e-6)  # at next to no learning rate
    capsys.readouterr()
    refused('exists', include)
    refused('no rung leads there', [
        'include', f"local-dir:{tmp_path / 'rich'}", 'sa_quadratic_cifar', '--output', tmp_path / 'poor'])
    assert not (tmp_path / 'poor').exists()


def test_prune_the_heads_one_names(checkpoint, tmp_path, capsys, refused):
    command = ['prune', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--output', str(tmp_path / 'pruned')]
    refused('nothing to prune', command)
    assert not (tmp_path / 'pruned').exists()
    main([*command, '--heads', '0:1,8', '5:0'])
    assert '1, 8' in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'pruned'}", pretrained=True)
    assert model.num_heads == (7, 9, 9, 9, 9, 8)


def test_prune_to_a_number_of_heads(degenerate, tmp_path, capsys, refused):
    fill(tmp_path / 'data' / 'train', range(2), count=3)
    output, data = ['--output', str(tmp_path / 'merged')], ['--data', str(tmp_path / 'data')]
    for wrong, message in ((['--keep', '4', '2'], 'keep=[4, 2]: needs --data'), (data, 'needs --keep')):
        refused(message, ['prune', degenerate, *output, *wrong])
    assert not (tmp_path / 'merged').exists()
    main(['prune', degenerate, *output, *data, '--keep', '4', '2', '--count', '4', '--json'])
    result = json.loads(capsys.readouterr().out)

    full = timm.create_model(degenerate, pretrained=True).eval()
    files = [f'{label}/{i}.png' for label in (0, 1) for i in (0, 1)]  # every 1.5th of six
    pictures = open_images([tmp_path / 'data' / 'train' / file for file in files])
    merged, report = merge_heads(full, (4, 2), preprocess(full, pictures))
    assert [tuple(row.values()) for row in result['dropped']] == [
        (merge.layer, list(merge.dropped), pytest.approx(merge.error, rel=1e-3)) for merge in report]
    assert result['after'] == dataclasses.asdict(counting.count(merged)) and 'train.py' in result['train']
    assert result['before']['parameters'] > result['after']['parameters']
    loaded = timm.create_model(result['model'], pretrained=True).eval()
    assert loaded.num_heads == (4, 2)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded(x), merged(x), rtol=1e-3, atol=1e-3)


def test_what_prune_says_trains_the_pruned_net_on(degenerate, timm_scripts, as_a_script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pytest.importorskip('datasets').config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    save_parquet(tmp_path / 'data')
    main(['prune', degenerate, '--output', str(tmp_path / 'pruned')])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('Train it on'))
    python, script, *command = shlex.split(line.split(':', 1)[1])
    assert python == 'python' and script == 'train.py'
    recipe = RECIPES / 'pruned.yaml'
    assert command[0] == '-c' and Path(command[1]).read_text() == recipe.read_text()
    for key, value in yaml.safe_load(recipe.read_text())['model_kwargs'].items():
        assert f'{key}={value}' in command  # they would be lost
    main(['run', os.path.join(timm_scripts, script), *command, '--dataset', f"hfds/{tmp_path / 'data'}", '--device',
          'cpu', '--no-prefetcher', '--workers', '0', '--batch-size', '2', '--epochs', '1', '--warmup-epochs', '0',
          '--lr', '1e-9', '--output', str(tmp_path), '--experiment', 'run'])
    trained = torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=False)['state_dict']
    pruned = timm.create_model(f"local-dir:{tmp_path / 'pruned'}", pretrained=True).state_dict()
    torch.testing.assert_close(trained, dict(pruned), rtol=0, atol=1e-6)  # at next to no learning rate
