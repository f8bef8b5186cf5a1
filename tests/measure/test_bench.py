"""The released algorithm gives the same outputs; times are measured in turn."""
import copy
import time

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.measure.bench import bench, gemm_limit, released, time_interleaved

SMALL = dict(embed_dim=8, mlp_dim=12, depth=2, num_heads=3)


def test_functions_take_turns_after_a_first_call(monkeypatch):
    calls, clock, waits = [], [0.], []

    def work(name, seconds):
        calls.append(name)
        clock[0] += seconds * (5 if calls.count(name) == 1 else 1)  # first calls allocate

    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True)  # of any type, not only CUDA
    monkeypatch.setattr(torch.accelerator, 'synchronize', lambda: waits.append(calls[-1]))
    seconds = time_interleaved([lambda: work('few', 0.002), lambda: work('many', 0.02)], min_run_time=0.05)
    assert seconds == pytest.approx([0.002, 0.02]) and waits == calls == ['few', 'many'] * 6
    assert time_interleaved([lambda: work('twice', 0.01)], min_run_time=1e-4) == pytest.approx([0.01])


@pytest.mark.parametrize('kwargs', [
    dict(), dict(encoding='learned', terms=('content', 'content_position'), hierarchical=True),
    dict(encoding='quadratic_gen', terms=('content', 'content_position', 'key_bias', 'position')),
    dict(encoding='sinusoid', terms=('content',)),
], ids=str)
def test_the_released_algorithm_gives_the_nets_logits_and_gradients(kwargs, images):
    torch.manual_seed(0)
    model = timm.create_model('sa_quadratic_cifar', **SMALL, **kwargs).eval().double()
    plain, x = released(model), images(2, 3, 16, 16).double()
    for net in (plain, model):
        net(x).square().sum().backward()
    torch.testing.assert_close(plain(x), model(x))
    torch.testing.assert_close([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_the_limit_is_of_all_linear_products(images):
    model = timm.create_model('sa_quadratic_cifar', **SMALL).eval()
    layer = [(512, 24, 8), (512, 8, 8), (512, 8, 12), (512, 12, 8)]  # value, second Linear, MLP
    macs = sum(rows * inputs * outputs for rows, inputs, outputs in [*layer, *layer, (2, 8, 10)])
    for train, products in ((False, 1), (True, 3)):
        multiply = gemm_limit(model, images(2, 3, 32, 32), train)
        with FlopCounterMode(display=False) as counter:
            multiply()
        assert counter.get_flop_counts()['Global'] == {torch.ops.aten.mm: 2 * products * macs}


def test_bench_of_our_nets_and_of_others():
    model = timm.create_model('sa_quadratic_tiny_cifar', **SMALL)
    state = copy.deepcopy(model.state_dict())
    speeds = bench(model, 16, 2, 'bfloat16', train=True, min_run_time=0.01)
    assert [s['path'] for s in speeds] == ['released algorithm', 'timm_selfconv'] and speeds[0]['ratio'] == 1.
    for s in speeds:
        assert (s['img_size'], s['batch_size'], s['dtype']) == (16, 2, 'bfloat16') and 0 < s['of_gemm_limit'] < 1
        assert s['images_per_second'] == pytest.approx(speeds[0]['images_per_second'] * s['ratio'])
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and model.training
    assert all(p.grad is None for p in model.parameters())
    speed, = bench(timm.create_model('resnet_tiny_cifar'), 32, 1, 'float32', min_run_time=0.01)
    assert (speed['path'], speed['ratio'], speed['of_gemm_limit']) == ('ResNetCifar', 1., None)
