"""Memory that layers take while they compute, of fake tensors too."""
import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_selfconv.layers import functional


@contextlib.contextmanager
def held_at_once(nbytes):
    """Let chunks and explicit scores take only so many bytes, so that small inputs make chunks, too."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ('CPU_BYTES', 'DEVICE_BYTES', 'SCORE_BYTES'):
            patch.setattr(functional, limit, nbytes)
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


def saved_bytes(module, x):
    """Bytes that autograd keeps of a call with x, parameters aside, and what the call returns."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(x)
    return sum(kept.values()), out
