"""A module for train.py's --device-modules that allows training on several CPU processes.

DistributedDataParallel refuses device_ids for modules on a CPU, but timm (1.0.31) always passes them.
"""
import torch.nn.parallel


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, **kwargs):
        super().__init__(module, **kwargs)


torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
