"""Nets on a fake GPU, on a real GPU if available, compiled, and on two processes."""
import copy

import pytest
import timm
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from held import needs_fakes
from tiny_nets import FAMILIES, ONE_LAYER, SHALLOW


@needs_fakes
@pytest.mark.parametrize('training,dtype', [(False, torch.float16), (True, torch.float32)])
@pytest.mark.parametrize('name', FAMILIES)
def test_on_a_fake_gpu(name, training, dtype):
    """All tensors are on one device, and nothing asks for a value. Fake tensors hold none."""
    mode, model = FakeTensorMode(), timm.create_model(name, device='meta', dtype=dtype, **SHALLOW[name], img_size=32)
    mode.allow_non_fake_inputs = True  # until the net is on the device
    with mode, torch.set_grad_enabled(training):
        model.to_empty(device='cuda').train(training)
        mode.allow_non_fake_inputs = False
        model.set_grad_checkpointing(training)
        images = torch.zeros(4, 3, 32, 32, device='cuda', dtype=dtype)
        logits = model(images)
    assert logits.device == images.device and logits.dtype == dtype


# dynamo is slow: a net of each class, in one pass
COMPILED = {
    **{f'{kind}_hier_cifar': ONE_LAYER for kind in ('sa_learned_content', 'resvit')},
    **{f'san_{kind}_cifar': dict(channels=(32,), depths=(1,)) for kind in ('pairwise', 'patchwise_hier')},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', COMPILED)
def test_compiled_as_one_graph_for_any_batch(name):
    """Forward and backward. Only the second batch size may compile again."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = timm.create_model(name, **COMPILED[name], img_size=16).eval()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, 16, 16)
        losses = [net(x).square().sum() for net in (compiled, model)]
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses))
    assert counters['stats']['unique_graphs'] <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('name,kwargs,backend', [
    *((*net, None) for net in SHALLOW.items()),
    *(pytest.param(*net, 'inductor', marks=pytest.mark.slow) for net in COMPILED.items())])
def test_on_a_gpu(name, kwargs, backend):
    """Compare logits and gradients, compiled or not, with float64 on the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, images, found = timm.create_model(name, **kwargs, img_size=32), torch.randn(16, 3, 32, 32), []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # 10 bits, by default
        for net, x in (copy.deepcopy(model).double(), images.double()), (model.cuda(), images.cuda()):
            logits = (torch.compile(net, backend=backend) if backend and x.is_cuda else net).train()(x)
            gradients = torch.autograd.grad(logits.square().sum(), list(net.parameters()))
            found.append([torch.cat([t.detach().cpu().double().flatten() for t in ts]) for ts in ([logits], gradients)])
    for wanted, got in zip(*found):
        assert (got - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.slow
def test_sharded_by_fsdp2_over_two_processes(tmp_path):
    from two_processes import work  # a module that both processes can import
    torch.multiprocessing.spawn(work, (tmp_path / 'store',), nprocs=2)
