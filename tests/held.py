"""Memory that layers use while they compute, also with fake tensors."""
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_selfconv.layers import functional

needs_fakes = pytest.mark.skipif(torch.__version__ < '2.14', reason='torch 2.7 asks the driver for fakes, or aborts')


def held_at_once(nbytes):
    """Limit the bytes of chunks and explicit scores, so that small inputs are split too."""
    return mock.patch.multiple(functional, CPU_BYTES=nbytes, DEVICE_BYTES=nbytes, SCORE_BYTES=nbytes)


class Memory(TorchDispatchMode):
    """Measures the outputs of operators: the peak of their bytes, and the elements of the largest one."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = self.largest = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            key, nbytes = t.untyped_storage()._cdata, t.untyped_storage().nbytes()
            if key not in self.seen | given:
                self.seen.add(key)
                self.held += nbytes
                self.peak = max(self.peak, self.held)
                self.largest = max(self.largest, nbytes // t.element_size())
                weakref.finalize(t.untyped_storage(), self.free, key, nbytes)
        return out

    def free(self, key, nbytes):
        self.seen.discard(key)
        self.held -= nbytes
