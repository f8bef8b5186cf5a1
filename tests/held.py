"""What layers hold while they compute, of fake tensors too."""
import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_selfconv.layers import attention
from timm_selfconv.layers.kernels import kernel
from timm_selfconv.models import san


@contextlib.contextmanager
def held_at_once(nbytes):
    """Let kernels and layers hold only so many bytes at a time on a CPU: of small inputs they make groups, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, 'CPU_MAP_BYTES', nbytes)
        patch.setattr(san, 'STEM_BYTES', nbytes)
        patch.setattr(kernel, 'CPU_BYTES', nbytes)
        yield


@contextlib.contextmanager
def in_groups(nbytes=1):
    """Let kernels alone, not layers, make groups of so few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, 'CPU_BYTES', nbytes)
        yield


class PeakBytes(TorchDispatchMode):
    """The most bytes that what operators make holds at one time."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.seen and storage._cdata not in given:
                    self.hold(storage)
        return out

    def hold(self, storage):
        nbytes, key = storage.nbytes(), storage._cdata
        self.seen.add(key)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.free, key, nbytes)

    def free(self, key, nbytes):
        self.seen.discard(key)
        self.held -= nbytes


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes, as they lie in memory."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel] + [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out
