"""Commands for the zoo: list, bench, export."""
import json
import re

import safetensors.torch
import torch
from PIL import Image

from timm_selfconv.models import zoo_names


def test_bench_against_the_released_algorithm_and_of_other_nets(little, output_of):
    command = ['bench', little, '--img-size', 8, '--batch-size', 1, 2, '--seconds', 0.01]
    out = output_of(*command)
    assert out.count('released algorithm') == out.count('timm_selfconv') == 2 and 'of the GEMM limit' in out
    out = output_of(*command, '--train', '--dtype', 'bfloat16')
    assert out.count('bfloat16') == 4 and 'forward and backward' in out
    out = output_of('bench', 'convit_tiny', '--untrained', '--batch-size', 1, '--seconds', 0.01)
    assert out.splitlines()[-1].split()[:2] == ['ConVit', '224']  # the net's own size


def test_list_and_tables_for_machines(output_of):
    assert {row['name'] for row in json.loads(output_of('list', '--json'))} == set(zoo_names())
    assert json.loads(output_of('list', '--tables', '--json'))[0]['label'] == 'ResNet18'
    assert json.loads(output_of('list', '--recipes', 'paper', '--json')).endswith('/paper.yaml')
    assert 'muon_tiny' in json.loads(output_of('list', '--recipes', '--json'))


def test_export_writes_a_measured_card_once(checkpoint, folder, tmp_path, output_of, refused, monkeypatch):
    name = 'sa_quadratic_tiny_cifar.from_another_net'
    command = ['export', name, '--checkpoint', checkpoint, '--data', folder,
               '--output', tmp_path / 'out', '--fact', 'seed=42', '--fact', 'recipe=a=b']
    (tmp_path / 'README.md').write_text('| epochs | 7 |\n')  # README of another project
    output_of(*command)
    card = (tmp_path / 'out' / f'{name}.md').read_text()
    assert '| seed | 42 |' in card and '| recipe | a=b |' in card and '| epochs |' not in card
    assert '| input | 3 x 32 x 32 |' in card and '| classes | 10: airplane, ' in card
    assert '(10 images of the test split of data, from this file' in card and 'CIFAR-10' not in card

    monkeypatch.chdir(tmp_path / 'out')  # the code of the card loads this file
    Image.new('RGB', (50, 40), 'white').save('cat.jpg')
    scope = {}
    for block in re.findall(r'^```python\n(.*?)^```$', card, re.MULTILINE | re.DOTALL):
        exec(block, scope)
    assert scope['probabilities'].shape == (10,) and len(scope['features']) > 1
    saved = safetensors.torch.load_file(f'{name}.safetensors')
    loaded = {key: value.to(saved[key].dtype) for key, value in scope['model'].state_dict().items()}
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    refused('exists', command)
    assert (tmp_path / 'out' / f'{name}.md').read_text() == card
