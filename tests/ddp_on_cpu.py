"""A device module for train.py's --device-modules that lets it train on several CPU processes.

DistributedDataParallel refuses device_ids for modules on a CPU, and timm (1.0.31) always gives it some.
"""
import torch.nn.parallel


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, **kwargs):
        super().__init__(module, **kwargs)


torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
