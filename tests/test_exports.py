"""Export to ONNX and torch.export, and half precision, give the same numbers."""
import pytest
import torch

from tiny_nets import SHALLOW, shallow_net

onnxruntime = pytest.importorskip('onnxruntime')
pytestmark = pytest.mark.slow

X = {n: torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1)) for n in (2, 5)}


def check_onnx(file, model):
    logits, = onnxruntime.InferenceSession(str(file)).run(None, {'x': X[5].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(X[5]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', [
    'sa_quadratic_cifar', 'sa_learned_content_hier_cifar', 'resvit_cifar', 'resnet_tiny_cifar', 'san_pairwise_cifar',
    'san_patchwise_cifar'])
def test_exports(name, tmp_path):
    """To ONNX by TorchScript and by dynamo, and by torch.export."""
    model, file = shallow_net(name).float(), tmp_path / 'net.onnx'
    shapes = dict(x={0: torch.export.Dim('batch', min=1)})
    torch.onnx.export(
        model, (X[2],), str(file), dynamo=False, input_names=['x'], dynamic_axes={'x': {0: 'batch'}})
    check_onnx(file, model)
    pytest.importorskip('onnxscript')
    if torch.__version__ < '2.14' and name.startswith(('resvit', 'san')):
        pytest.skip('torch 2.7 cannot export these nets for any batch size')
    program = torch.export.export(model, (X[2],), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(X[5]), model(X[5]))
    torch.onnx.export(model, (X[2],), str(file), dynamo=True, input_names=['x'], verbose=False, dynamic_shapes=shapes)
    check_onnx(file, model)


@pytest.mark.parametrize('name', SHALLOW)
def test_half_precision(name):
    wanted = shallow_net(name).float()(X[2])
    for dtype in (torch.bfloat16, torch.float16):
        error = (shallow_net(name).to(dtype)(X[2].to(dtype)).float() - wanted).abs().max()
        assert 0 < error < 4 * torch.finfo(dtype).eps * wanted.abs().max()
