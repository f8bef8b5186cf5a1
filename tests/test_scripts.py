"""timm's own scripts through `timm-selfconv run`, as recipes/README.md lists them, in this process.

train.py and bulk_runner.py are in tests/test_readme.py.
"""
import csv
import json
import os
import re

import pytest
import timm

from pictures import fill
from timm_selfconv.cli import main
from timm_selfconv.data import open_images, top_classes
from timm_selfconv.models import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD

pytestmark = pytest.mark.slow
NET = 'sa_quadratic_tiny_cifar'
ON_CPU = ['--device', 'cpu']


@pytest.fixture
def run(timm_scripts, as_a_script, capfd):
    """Run a script in this process and return its output."""
    def run(script, *arguments):
        main(['run', os.path.join(timm_scripts, script), *map(str, arguments)])
        return capfd.readouterr().out

    return run


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    """One picture of noise per class, by class."""
    folder = fill(tmp_path_factory.mktemp('pictures') / 'test', CIFAR10_CLASSES)
    return {name: (folder / name / '0.png').rename(folder / name / f'{name}.png') for name in CIFAR10_CLASSES}


@pytest.fixture(scope='module')
def folder(pictures):
    return pictures['cat'].parents[2]


def seen(name, pictures):
    """Return the predicted class of each picture, and the accuracy in per cent."""
    net = timm.create_model(name, pretrained=True)
    results = [best for best, in top_classes(net, open_images(list(pictures.values())), 1)]
    answers = {true: answer for true, (answer, _) in zip(pictures, results)}
    return answers, 10. * sum(true == answer for true, answer in answers.items())


def test_validate_with_a_wildcard(run, pictures, folder, tmp_path):
    run('validate.py', '--model', 'sa_learned_content*tiny*', '--pretrained', '--data-dir', folder, '--split', 'test',
        '--workers', 0, '--no-prefetcher', '--results-file', tmp_path / 'results.csv', *ON_CPU)
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    nets = ('sa_learned_content_hier_tiny_cifar', 'sa_learned_content_tiny_cifar')
    assert {row['model'].removesuffix('.cifar10'): float(row['top1']) for row in rows} == {
        net: seen(net, pictures)[1] for net in nets}


def test_inference(run, pictures, folder, tmp_path):
    run('inference.py', '--model', NET, '--pretrained', '--data-dir', folder / 'test', '--workers', 0,
        '--results-file', tmp_path / 'results.csv', '--include-index', *ON_CPU)
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    told = {row['filename'].removesuffix('.png'): CIFAR10_CLASSES[int(row['index'])] for row in rows}
    assert told == seen(NET, pictures)[0]


def test_benchmark(run):
    out = run('benchmark.py', '--model', NET, '--bench', 'infer', '--batch-size', 2, '--num-warm-iter', 1,
              '--num-bench-iter', 5, *ON_CPU)
    result = json.loads(out.split('--result')[-1])
    assert result['model'] == NET and result['infer_samples_per_sec'] > 0 and result['infer_img_size'] == 32


def test_exported_to_onnx_and_validated(run, pictures, folder, tmp_path):
    """By TorchScript. tests/test_exports.py uses dynamo too."""
    pytest.importorskip('onnxruntime')
    file = tmp_path / 'net.onnx'
    run('onnx_export.py', file, '--model', NET, '--dynamic-size')
    out = run('onnx_validate.py', folder / 'test', '--onnx-input', file, '--workers', 0, '--img-size', 32,
              '--crop-pct', 1, '--interpolation', 'bicubic', '--mean', *CIFAR10_MEAN, '--std', *CIFAR10_STD)
    assert float(re.findall(r'\* Prec@1 ([\d.]+)', out)[0]) == seen(NET, pictures)[1]
