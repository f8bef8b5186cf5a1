"""Commands that use a net: classify, demo, heads, figures, explore, theorem."""
import json
import os
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from drawn import write_run
from timm_selfconv.cli import main
from timm_selfconv.data import open_images, preprocess

NET = 'sa_quadratic_tiny_cifar'


def test_classify_files_and_folders(checkpoint, folder, output_of, capsys):
    cat = folder / 'test' / 'cat'
    (cat / 'broken.png').write_text('hello')
    names = [f'{cat}/0.png', f'{folder}/test/bird/caf\udce9.png']  # a name in Latin-1
    os.rename(folder / 'test' / 'bird' / '0.png', names[1])
    command = ['classify', NET, '--checkpoint', checkpoint, '--topk', '11']
    with pytest.raises(SystemExit) as stopped:
        main([*command, str(cat), names[1], '--json'])
    printed = capsys.readouterr()
    assert stopped.value.code == 1 and 'broken.png' in printed.err and printed.err.count('\n') == 1
    rows = json.loads(printed.out)
    assert [row['picture'] for row in rows] == [name for name in names for _ in range(10)]
    for start in (0, 10):
        probabilities = [row['probability'] for row in rows[start:start + 10]]
        assert sum(probabilities) == pytest.approx(1) and probabilities == sorted(probabilities, reverse=True)
    with pytest.raises(SystemExit):
        main([*command, f'{cat}/broken.png'])
    assert capsys.readouterr().out == ''
    out = output_of(*command, *names)
    assert all(text in out for text in ('0.png', r'caf\udce9.png', 'probability', 'The net has 10 classes: airplane,'))


def test_grey_nets_see_grey_and_names_of_classes_stay(folder, tmp_path, output_of):
    net = timm.create_model(NET, in_chans=1, num_classes=2, embed_dim=8, mlp_dim=8, depth=1)
    net.pretrained_cfg.update(num_classes=2, label_names=('1.10', '1e5'))
    save_for_hf(net, tmp_path / 'net', safe_serialization=True)
    files = [folder / 'test' / 'cat' / '0.png', tmp_path / 'grey.png']
    out = output_of('classify', f"local-dir:{tmp_path / 'net'}", files[0], '--topk', '2')
    assert {'1.10', '1e5'} < set(out.split())
    Image.open(files[0]).convert('L').save(files[1])
    colour, grey = preprocess(net, open_images(files))
    assert colour.shape == (1, 32, 32) and torch.equal(colour, grey)


def test_heads(checkpoint, little, output_of):
    command = ['heads', NET, '--checkpoint', checkpoint, '--kernel-size', '5']
    result = json.loads(output_of(*command, '--json'))
    assert result['model'] == NET and result['kernel_size'] == 5
    assert [layer['layer'] for layer in result['layers']] == list(range(6))
    assert all(16 / 25 <= layer['residual'] <= layer['shared_residual'] <= 1 for layer in result['layers'])
    assert [head['head'] for head in result['layers'][5]['heads']] == list(range(9))
    out = output_of(*command)
    assert f"{result['layers'][3]['residual']:.3f}" in out and '5 x 5 convolution' in out
    printed = [output_of('heads', little, '--untrained') for _ in range(2)]
    assert printed[0] == printed[1] != out  # from a fixed seed


def test_demo(output_of):
    pytest.importorskip('foolbox')
    out = output_of('demo')
    rows = [line.split() for line in out.splitlines() if line.startswith('cifar10_')]
    assert len(rows) == 10 and sum(row[1] == row[2] for row in rows) >= 8
    assert 'Table 1' in out and '12.1M' in out


def test_figures(little, tmp_path, output_of, refused):
    command = ['figures', little, '--out', tmp_path / 'out']
    files = output_of(*command).split()
    assert sorted(files) == sorted(map(str, (tmp_path / 'out').iterdir()))
    assert all(Image.open(file).width == 990 for file in files)  # 5.5 inches at 180 dots
    os.remove(files[0])
    refused('out exists', command)
    assert not os.path.exists(files[0])


@pytest.mark.slow
def test_figures_of_runs_pictures_and_datasets(little, folder, tmp_path, output_of):
    run = tmp_path / 'run'
    write_run(run, timm.create_model(little, pretrained=True), (8, 8), range(2))
    output_of('figures', little, '--out', tmp_path / 'out', '--images', folder / 'test/cat/0.png', '--query', 1, 3,
              '--run', run, '--curves', run, 'sa_learned_tiny_cifar')
    assert {'centers', 'attention', 'kernels', 'overlay-0', 'curves', 'training'} < {
        file.stem for file in (tmp_path / 'out').iterdir()}
    output_of('figures', little, '--data', folder, '--count', 3, '--out', tmp_path / 'svg', '--format', 'svg')
    assert (tmp_path / 'svg' / 'average.svg').is_file()


def test_explore(checkpoint, folder, tmp_path, output_of, refused):
    picture, page = folder / 'test' / 'cat' / '0.png', tmp_path / 'out' / 'explorer.html'
    command = ['explore', NET, picture, picture, '--out', page]
    assert 'open it in a browser' in output_of(*command, '--checkpoint', checkpoint)
    text = page.read_text()
    for name in (NET, '0.png', '0.png (2)', f'weights of {Path(checkpoint).name}'):
        assert f'"{name}"' in text
    refused('exists', command)
    assert page.read_text() == text

    shared = timm.create_model(  # one layer, three passes
        'sa_quadratic_cifar', depth=3, hierarchical=True, num_heads=2, embed_dim=8, mlp_dim=8, patch_size=8)
    save_for_hf(shared, tmp_path / 'run', safe_serialization=True)
    write_run(tmp_path / 'run', shared, (4, 4), range(2))
    output_of('explore', f"local-dir:{tmp_path / 'run'}", picture, '--out', page.with_name('film.html'))
    assert '"film": {"heads": ' in page.with_name('film.html').read_text()
