"""Commands that use a net: classify, demo, heads, figures, explore, theorem."""
import json
import os
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from drawn import heads_of
from timm_selfconv.cli import main
from timm_selfconv.data import open_images, preprocess
from timm_selfconv.weights.history import write_history


def test_classify_files_and_folders(checkpoint, folder, capsys):
    Path(folder, 'test', '3', 'broken.png').write_text('hello')
    names = [f'{folder}/test/{i}/0.png' for i in (3, 1)]
    command = ['classify', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--topk', '11']
    with pytest.raises(SystemExit) as stopped:
        main([*command, f'{folder}/test/3', names[1], '--json'])
    printed = capsys.readouterr()
    assert stopped.value.code == 1 and 'broken.png' in printed.err and printed.err.count('\n') == 1
    rows = json.loads(printed.out)
    assert [row['picture'] for row in rows] == [name for name in names for _ in range(10)]
    for name in names:
        probabilities = [row['probability'] for row in rows if row['picture'] == name]
        assert sum(probabilities) == pytest.approx(1) and probabilities == sorted(probabilities, reverse=True)
    with pytest.raises(SystemExit):
        main([*command, f'{folder}/test/3/broken.png'])
    assert capsys.readouterr().out == ''
    main([*command, names[0]])
    out = capsys.readouterr().out
    assert '0.png' in out and 'probability' in out and 'The net has 10 classes: airplane,' in out


def test_grey_nets_see_grey_and_names_of_classes_stay(folder, tmp_path, capsys):
    net = timm.create_model('sa_quadratic_tiny_cifar', in_chans=1, num_classes=2, embed_dim=8, mlp_dim=8, depth=1)
    net.pretrained_cfg.update(num_classes=2, label_names=('1.10', '1e5'))
    save_for_hf(net, tmp_path / 'net', safe_serialization=True)
    main(['classify', f"local-dir:{tmp_path / 'net'}", f'{folder}/test/3/0.png', '--topk', '2'])
    assert {'1.10', '1e5'} < set(capsys.readouterr().out.split())
    with Image.open(f'{folder}/test/3/0.png') as image:
        image.convert('L').save(f'{folder}/grey.png')
    colour, grey = (preprocess(net, open_images([f'{folder}/{file}'])) for file in ('test/3/0.png', 'grey.png'))
    assert colour.shape == (1, 1, 32, 32) and torch.equal(colour, grey)


def test_heads(checkpoint, little, capsys):
    command = ['heads', 'sa_quadratic_tiny_cifar', '--checkpoint', checkpoint, '--kernel-size', '5']
    main([*command, '--json'])
    result = json.loads(capsys.readouterr().out)
    assert result['model'] == 'sa_quadratic_tiny_cifar' and result['kernel_size'] == 5
    assert [layer['layer'] for layer in result['layers']] == list(range(6))
    assert all(16 / 25 <= layer['residual'] <= layer['shared_residual'] <= 1 for layer in result['layers'])
    assert [head['head'] for head in result['layers'][5]['heads']] == list(range(9))
    main(command)
    out = capsys.readouterr().out
    assert f"{result['layers'][3]['residual']:.3f}" in out and '5 x 5 convolution' in out

    printed = []
    for _ in range(2):
        main(['heads', little, '--untrained'])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != out  # from a fixed seed


def test_demo(capsys):
    pytest.importorskip('foolbox')
    main(['demo'])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith('cifar10_')]
    assert len(rows) == 10 and sum(row[1] == row[2] for row in rows) >= 8
    assert 'Table 1' in out and '12.1M' in out


def test_figures(little, tmp_path, capsys, refused):
    command = ['figures', little, '--out', str(tmp_path / 'out')]
    main(command)
    files = capsys.readouterr().out.split()
    assert sorted(files) == sorted(map(str, (tmp_path / 'out').iterdir()))
    assert all(Image.open(file).width == 990 for file in files)  # 5.5 inches at 180 dots
    os.remove(files[0])
    refused('out exists', command)
    assert not os.path.exists(files[0])


@pytest.mark.slow
def test_figures_of_runs_pictures_and_datasets(little, folder, tmp_path):
    model, run = timm.create_model(little, pretrained=True), tmp_path / 'run'
    run.mkdir()
    write_history(run / 'history.json', model.pretrained_cfg['architecture'], [8, 8], [
        dict(epochs=i, heads=heads_of(model, (8, 8)), train_loss=1., eval_top1=40.) for i in range(2)])
    main(['figures', little, '--out', str(tmp_path / 'out'), '--images', f'{folder}/test/3/0.png', '--query', '1', '3',
          '--run', str(run), '--curves', str(run), 'sa_learned_tiny_cifar'])
    assert {'centers', 'attention', 'kernels', 'overlay-0', 'curves', 'training'} < {
        file.stem for file in (tmp_path / 'out').iterdir()}
    main(['figures', little, '--data', folder, '--count', '3', '--out', str(tmp_path / 'svg'), '--format', 'svg'])
    assert (tmp_path / 'svg' / 'average.svg').is_file()


def test_explore(checkpoint, folder, tmp_path, capsys, refused):
    picture, page = f'{folder}/test/3/0.png', tmp_path / 'out' / 'explorer.html'
    command = ['explore', 'sa_quadratic_tiny_cifar', picture, picture, '--out', str(page)]
    main([*command, '--checkpoint', checkpoint])
    assert 'open it in a browser' in capsys.readouterr().out
    text = page.read_text()
    weights = f'weights of {Path(checkpoint).name}'
    for name in ('sa_quadratic_tiny_cifar', '0.png', '0.png (2)', weights):
        assert f'"{name}"' in text
    refused('exists', command)
    assert page.read_text() == text
