"""What a layer holds, of fake tensors too."""
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
