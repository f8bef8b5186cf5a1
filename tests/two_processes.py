"""Work of each of the two processes of tests/models/test_devices.py."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import timm_selfconv  # noqa: F401  registers the nets
from tiny_nets import noise, shallow_net

SIZES = dict(  # of images, small because two processes are slow
    sa_quadratic_cifar=8, sa_learned_content_cifar=8, resvit_cifar=8, resvit_hier_cifar=8, san_patchwise_cifar=32,
    san_pairwise_hier_cifar=8, resnet_tiny_cifar=16)
REPEATED = ('Block', 'BasicBlock', 'Bottleneck', 'Stage')


def check_shards(name, rank):
    """Compare loss and gradients of FSDP2, half of a batch on each process, with the plain net on the whole batch."""
    plain, sharded = (shallow_net(name, img_size=SIZES[name]) for _ in range(2))
    for block in reversed([m for m in sharded.modules() if type(m).__name__ in REPEATED]):  # inner blocks first
        fully_shard(block)
    fully_shard(sharded)
    x = noise(4, 3, SIZES[name], SIZES[name])
    for training in (False, True):  # in training, norms need the whole batch
        plain.train(training), sharded.train(training)
        wanted = plain(x).square().mean()
        found = sharded(x if training else x[2 * rank:2 * rank + 2]).square().mean()
        wanted.backward(), found.backward()
        dist.all_reduce(found.detach_(), dist.ReduceOp.SUM)
        torch.testing.assert_close(found / 2, wanted.detach())
        for ours, theirs in zip(sharded.parameters(), plain.parameters()):
            assert isinstance(ours, DTensor) and ours.to_local().shape[0] <= (theirs.shape[0] + 1) // 2
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    for name in SIZES:
        check_shards(name, rank)
    dist.destroy_process_group()
