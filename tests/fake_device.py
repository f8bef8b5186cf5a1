"""Fake tensors on a GPU. They have no data, so operators check only devices and shapes."""
import contextlib
import functools

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


TORCH = torch.torch_version.TorchVersion(torch.__version__)
needs_fakes = pytest.mark.skipif(TORCH < '2.14', reason='torch 2.7 asks the driver for fake tensors, or aborts')


@contextlib.contextmanager
def fake_net(name, device='cuda', **kwargs):
    """Make a net of fake tensors on a device. Tensors created in this context are on the same device."""
    model, mode = timm.create_model(name, device='meta', **kwargs), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model.to_empty(device=device)
        mode.allow_non_fake_inputs = False
        yield model


@contextlib.contextmanager
def autocast(dtype, device='cuda'):
    """torch.autocast on a missing device, where torch would disable it."""
    was = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, dtype is not None)
        torch.set_autocast_dtype(device, dtype or was[1])
        yield
    finally:
        torch.set_autocast_enabled(device, was[0])
        torch.set_autocast_dtype(device, was[1])
        torch.clear_autocast_cache()


@functools.cache
def runs_backward(device='cuda'):
    """Return True if torch's autograd accepts fake tensors of a missing device. A CUDA build asks the driver."""
    with FakeTensorMode():
        x = torch.zeros(1, device=device, requires_grad=True)
        try:
            x.sum().backward()
        except RuntimeError:
            return False
    return True
