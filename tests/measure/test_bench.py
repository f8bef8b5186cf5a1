import pytest
import timm
import torch
import torch.nn as nn

from timm_selfconv.measure.bench import bench_nets, bench_paths


class Work(nn.Module):
    """As many matrix products as wanted."""

    def __init__(self, products):
        super().__init__()
        self.products = products
        self.calls = 0

    def forward(self, x):
        assert not self.training and not torch.is_grad_enabled()
        self.calls += 1
        for _ in range(self.products):
            x = x @ x
        return x


def test_nets_take_turns_and_more_work_takes_longer():
    few, many = Work(1).train(), Work(60).train()
    seconds = bench_nets([few, many], torch.zeros(1, 1, 96, 96), min_run_time=0.005)
    assert few.calls == many.calls > 1
    assert seconds[1] > seconds[0] > 0


def test_paths_are_those_of_one_net():
    model = timm.create_model('sa_quadratic_tiny_cifar')
    times = bench_paths(model, 32, batch_size=1, min_run_time=0.01)
    assert times.dense > 0 and times.fused > 0 and times.ratio == times.dense / times.fused
    with pytest.raises(ValueError, match='needs a SelfAttentionNet'):
        bench_paths(timm.create_model('resnet_tiny_cifar'), 32)
