"""Export to ONNX and torch.export, and half precision, give the same numbers."""
import pytest
import timm
import torch

from held import TORCH
from tiny_nets import SHALLOW

onnxruntime = pytest.importorskip('onnxruntime')
pytestmark = pytest.mark.slow

EXPORTED = (
    'sa_quadratic_cifar', 'sa_learned_content_cifar', 'resvit_cifar', 'resnet_tiny_cifar', 'san_pairwise_cifar',
    'san_patchwise_cifar')


def shallow(name):
    torch.manual_seed(0)
    return timm.create_model(name, **SHALLOW[name]).eval()


def images(n):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('name', [*EXPORTED, 'sa_learned_content_hier_cifar'])
def test_torchscript_based_onnx(name, tmp_path):
    model, file = shallow(name), tmp_path / 'net.onnx'
    torch.onnx.export(
        model, (images(2),), str(file), dynamo=False, input_names=['x'], dynamic_axes={'x': {0: 'batch'}})
    logits, = onnxruntime.InferenceSession(str(file)).run(None, {'x': images(5).numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(images(5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', EXPORTED)
def test_torch_export_and_onnx_by_dynamo(name, tmp_path):
    pytest.importorskip('onnxscript')
    if TORCH < '2.14' and name.startswith(('resvit', 'san')):
        pytest.skip('torch 2.7 requires an upper bound of the batch size')
    model, file, shapes = shallow(name), tmp_path / 'net.onnx', dict(x={0: torch.export.Dim('batch', min=1)})
    program = torch.export.export(model, (images(2),), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(images(5)), model(images(5)))
    torch.onnx.export(
        model, (images(2),), str(file), dynamo=True, input_names=['x'], verbose=False, dynamic_shapes=shapes)
    logits, = onnxruntime.InferenceSession(str(file)).run(None, {'x': images(5).numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(images(5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', [*EXPORTED, 'sa_quadratic_gen_cifar'])
def test_half_precision(name):
    wanted = shallow(name)(images(2))
    for dtype in (torch.bfloat16, torch.float16):
        error = (shallow(name).to(dtype)(images(2).to(dtype)).float() - wanted).abs().max()
        assert 0 < error < 4 * torch.finfo(dtype).eps * wanted.abs().max()
