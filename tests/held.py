"""Memory that layers use while they compute, also with fake tensors."""
import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_selfconv.layers import functional

TORCH = torch.torch_version.TorchVersion(torch.__version__)
needs_fakes = pytest.mark.skipif(TORCH < '2.14', reason='torch 2.7 asks the driver for fake tensors, or aborts')


@contextlib.contextmanager
def held_at_once(nbytes):
    """Limit the bytes of chunks and explicit scores, so that small inputs are split too."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ('CPU_BYTES', 'DEVICE_BYTES', 'SCORE_BYTES'):
            patch.setattr(functional, limit, nbytes)
        yield


class PeakBytes(TorchDispatchMode):
    """Measures the peak number of bytes in outputs of operators."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]:
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self.seen | given:
                self.seen.add(key)
                self.held += nbytes
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self.free, key, nbytes)
        return out

    def free(self, key, nbytes):
        self.seen.discard(key)
        self.held -= nbytes


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes, as they lie in memory."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.untyped_storage().nbytes() // t.element_size() for t in tensors)])
        return out


def saved_bytes(module, x):
    """Return the bytes that autograd saves for a call with x, without parameters, and the output."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(x)
    return sum(kept.values()), out
