"""What tests/models/test_two_processes.py does in each of two processes that talk by gloo, on a CPU."""
import pytest
import timm
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import timm_selfconv  # noqa: F401  registers the nets
from tiny_nets import TINY

SIZES = dict(  # of images, which two processes take their time for
    sa_quadratic_cifar=8, sa_learned_content_cifar=8, sa_learned_content_hier_cifar=8, resvit_cifar=8,
    resvit_hier_cifar=8, san_patchwise_cifar=32, san_pairwise_hier_cifar=8, san_patchwise_hier_cifar=8,
    resnet_tiny_cifar=16)
HIERARCHICAL = TINY['san_pairwise_hier_cifar']
REPEATED = ('Block', 'BasicBlock', 'Bottleneck', 'Stage')


def net(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **TINY.get(name, HIERARCHICAL), img_size=SIZES[name]).double()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1., 0.3)  # norms of places would meet the kink of ReLU, where rounding decides
    return model


def images(name):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, SIZES[name], SIZES[name], generator=generator, dtype=torch.float64)


def half(x, rank):
    return x[2 * rank:2 * rank + 2]


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def check_shards(name, rank):
    """A step of blocks sharded by FSDP2, half of a batch on each process, is one of the net on the whole batch."""
    plain, sharded = net(name), net(name)
    for block in reversed([m for m in sharded.modules() if type(m).__name__ in REPEATED]):  # the inner ones first
        fully_shard(block)
    fully_shard(sharded)
    x = images(name)
    for training in (False, True):  # where norms must see the whole batch
        plain.train(training), sharded.train(training)
        wanted, found = step(plain, x), step(sharded, x if training else half(x, rank))
        dist.all_reduce(found, dist.ReduceOp.SUM)
        torch.testing.assert_close(found / 2, wanted)
        for ours, theirs in zip(sharded.parameters(), plain.parameters()):
            assert isinstance(ours, DTensor)
            share = [*theirs.detach().chunk(2), theirs[:0].detach()][rank]  # the second of one row is empty
            torch.testing.assert_close(ours.to_local().detach(), share)


class AllReduce(torch.autograd.Function):
    """Sum over processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


class SyncedByGloo(torch.nn.SyncBatchNorm):
    """torch's synchronised batch norm, but for its kernels, which need a GPU."""

    def forward(self, x):
        channels, total = (1, -1, 1, 1), x.numel() // x.shape[1] * dist.get_world_size()
        mean = AllReduce.apply(x.sum((0, 2, 3))) / total
        var = AllReduce.apply((x - mean.view(channels)).square().sum((0, 2, 3))) / total
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * total / (total - 1), self.momentum)
        x = (x - mean.view(channels)) * (var.view(channels) + self.eps).rsqrt()
        return x if self.weight is None else x * self.weight.view(channels) + self.bias.view(channels)


def check_norms(name, rank):
    """A step with synchronised norms, half of a batch on each process, is one of the net on the whole batch."""
    x, plain, synced = images(name), net(name).train(), torch.nn.SyncBatchNorm.convert_sync_batchnorm(net(name)).train()
    with pytest.raises(ValueError, match='SyncBatchNorm expected input tensor to be on GPU'):
        synced(x)
    for norm in synced.modules():
        if type(norm) is torch.nn.SyncBatchNorm:
            norm.__class__ = SyncedByGloo
            norm.num_batches_tracked.zero_()
    plain(x).square().mean().backward()
    synced(half(x, rank)).square().mean().backward()
    for ours, theirs in zip(synced.parameters(), plain.parameters()):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad / 2, theirs.grad)
    buffers = dict(synced.named_buffers())
    for n, statistics in plain.named_buffers():
        torch.testing.assert_close(buffers[n], statistics)


CHECKS = [
    *((check_shards, name) for name in SIZES), *((check_norms, name) for name in SIZES if name[:3] in ('san', 'res'))]


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    for check, name in CHECKS:
        try:
            check(name, rank)
        except Exception as e:
            raise RuntimeError(f'{check.__name__} of {name}') from e
    dist.destroy_process_group()
