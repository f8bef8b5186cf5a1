"""What a net costs, and how good it is: eval, bench, list, tables."""
import json

from timm_selfconv.models import zoo_names
from timm_selfconv.cli import main


def test_eval(checkpoint, folder, capsys):
    command = ['eval', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--data', folder]
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['images'] == 10 and set(result['per_class'].values()) <= {0., 1.}
    main(command)
    out = capsys.readouterr().out
    assert f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f} on 10 images" in out and 'airplane' in out


def test_bench_against_the_released_algorithm(capsys):
    command = ['bench', 'sa_quadratic_tiny_cifar', '--img-size', '8', '--batch-size', '1', '2', '--seconds', '0.01']
    main([*command, '--fuse'])
    out = capsys.readouterr().out
    assert out.count('released algorithm') == out.count('fused') == 2 and 'of the GEMM limit' in out
    main([*command, '--train', '--dtype', 'bfloat16', '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['train'] and [(s['path'], s['batch_size'], s['dtype']) for s in result['speeds']] == [
        (path, batch, 'bfloat16') for batch in (1, 2) for path in ('released algorithm', 'timm_selfconv')]


def test_bench_takes_images_of_the_nets_own_size(capsys):
    main(['bench', 'convit_tiny', '--untrained', '--batch-size', '1', '--seconds', '0.01', '--json'])
    assert [s['img_size'] for s in json.loads(capsys.readouterr().out)['speeds']] == [224, 224]


def test_list_and_tables_for_machines(capsys):
    main(['list', '--json'])
    rows = json.loads(capsys.readouterr().out)
    assert {row['name'] for row in rows} == set(zoo_names())
    main(['tables', '--json'])
    printed = json.loads(capsys.readouterr().out)
    assert printed['tables'][0]['label'] == 'ResNet18' and {'paper', 'here'} <= set(printed['results'][0])
