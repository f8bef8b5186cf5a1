"""Commands for the zoo: list, bench, export."""
import json

import safetensors.torch
import torch

from timm_selfconv.models import zoo_names
from timm_selfconv.cli import main


def test_bench_against_the_released_algorithm(little, capsys):
    command = ['bench', little, '--img-size', '8', '--batch-size', '1', '2', '--seconds', '0.01']
    main(command)
    out = capsys.readouterr().out
    assert out.count('released algorithm') == out.count('timm_selfconv') == 2 and 'of the GEMM limit' in out
    main([*command, '--train', '--dtype', 'bfloat16'])
    out = capsys.readouterr().out
    assert out.count('bfloat16') == 4 and 'forward and backward' in out


def test_bench_takes_images_of_the_nets_own_size(capsys):
    main(['bench', 'convit_tiny', '--untrained', '--batch-size', '1', '--seconds', '0.01'])
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ['ConVit', '224']


def test_list_and_tables_for_machines(capsys):
    main(['list', '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert {row['name'] for row in rows} == set(zoo_names())
    main(['list', '--tables', '--json'])
    assert json.loads(capsys.readouterr().out)[0]['label'] == 'ResNet18'


def test_export_writes_a_measured_card_once(checkpoint, named, tmp_path, refused, monkeypatch):
    name = 'sa_quadratic_tiny_cifar.from_another_net'
    command = ['export', name, '--checkpoint', checkpoint, '--data', named,
               '--output', str(tmp_path / 'out'), '--fact', 'seed=42', '--fact', 'recipe=a=b']
    (tmp_path / 'README.md').write_text('| epochs | 7 |\n')  # README of another project
    main(command)
    card = (tmp_path / 'out' / f'{name}.md').read_text()
    assert '| seed | 42 |' in card and '| recipe | a=b |' in card and '| epochs |' not in card
    assert '| input | 3 x 32 x 32 |' in card and '| classes | 10: airplane, ' in card
    assert '(10 images of the test split of data, from this file' in card and 'CIFAR-10' not in card

    monkeypatch.chdir(tmp_path / 'out')  # the code of the card loads this file
    scope = {}
    exec(card.split('```python')[1].split('```')[0], scope)
    saved = safetensors.torch.load_file(f'{name}.safetensors')
    loaded = {key: value.to(saved[key].dtype) for key, value in scope['model'].state_dict().items()}
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    refused('exists', command)
    assert (tmp_path / 'out' / f'{name}.md').read_text() == card
