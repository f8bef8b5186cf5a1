"""timm's own scripts through `timm-selfconv run`, in this process.

train.py, validate.py and bulk_runner.py are in tests/test_readme.py.
"""
import csv
import json
import re

import pytest
import timm

from pictures import fill
from timm_selfconv.data import open_images, top_classes
from timm_selfconv.models import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('as_a_script')]
NET = 'sa_quadratic_tiny_cifar'


@pytest.fixture
def pictures(tmp_path):
    """A folder with one picture of noise per class, and our predicted classes by file."""
    folder = fill(tmp_path / 'test', CIFAR10_CLASSES)
    files = [(folder / name / '0.png').rename(folder / name / f'{name}.png') for name in CIFAR10_CLASSES]
    results = top_classes(timm.create_model(NET, pretrained=True), open_images(files), 1)
    return folder, {file.stem: name for file, ((name, _),) in zip(files, results)}


def test_inference(timm_scripts, output_of, pictures, tmp_path):
    folder, answers = pictures
    output_of('run', f'{timm_scripts}/inference.py', '--model', NET, '--pretrained', '--data-dir', folder,
              '--workers', 0, '--results-file', tmp_path / 'results.csv', '--include-index', '--device', 'cpu')
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert {row['filename'].removesuffix('.png'): CIFAR10_CLASSES[int(row['index'])] for row in rows} == answers


def test_benchmark(timm_scripts, output_of):
    out = output_of('run', f'{timm_scripts}/benchmark.py', '--model', NET, '--bench', 'infer', '--batch-size', 2,
                    '--num-warm-iter', 1, '--num-bench-iter', 5, '--device', 'cpu')
    result = json.loads(out.split('--result')[-1])
    assert result['model'] == NET and result['infer_samples_per_sec'] > 0 and result['infer_img_size'] == 32


def test_exported_to_onnx_and_validated(timm_scripts, output_of, pictures, tmp_path):
    """By TorchScript. tests/test_exports.py uses dynamo too."""
    pytest.importorskip('onnxruntime')
    (folder, answers), file = pictures, tmp_path / 'net.onnx'
    output_of('run', f'{timm_scripts}/onnx_export.py', file, '--model', NET, '--dynamic-size')
    out = output_of(
        'run', f'{timm_scripts}/onnx_validate.py', folder, '--onnx-input', file, '--workers', 0, '--img-size', 32,
        '--crop-pct', 1, '--interpolation', 'bicubic', '--mean', *CIFAR10_MEAN, '--std', *CIFAR10_STD)
    right = sum(true == answer for true, answer in answers.items())
    assert float(re.findall(r'\* Prec@1 ([\d.]+)', out)[0]) == 10. * right
