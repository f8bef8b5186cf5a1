import copy
import time

import pytest
import timm
import torch
import torch.nn as nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from timm_selfconv.layers.kernels.kernel import switched
from timm_selfconv.measure.bench import Speed, bench, bench_nets, gemm_limit, peak_memory, released, \
    time_interleaved

SMALL = dict(embed_dim=8, mlp_dim=12, depth=2, num_heads=3)


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
    assert few.calls == many.calls > 3
    assert seconds[1] > seconds[0] > 0


def test_slow_calls_take_fewer_turns():
    seconds, turns = time_interleaved([lambda: time.sleep(0.01), lambda: time.sleep(0.04)], min_run_time=1e-4)
    assert turns == 1 and seconds[1] > seconds[0] > 0.01
    assert time_interleaved([lambda: None], min_run_time=1e-3)[1] > 3


@pytest.mark.parametrize('kwargs', [
    dict(), dict(encoding='quadratic_gen'), dict(encoding='learned'),
    dict(encoding='learned', terms=('content', 'content_position')),
    dict(encoding='learned', terms=('content', 'content_position'), hierarchical=True),
    dict(terms=('content', 'content_position', 'key_bias', 'position')),
    dict(encoding='quadratic_gen', terms=('key_bias',)),
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
        multiply = gemm_limit(released(model), images(2, 3, 32, 32), train)
        with FlopCounterMode(display=False) as counter:
            multiply()
        assert counter.get_flop_counts()['Global'] == {torch.ops.aten.mm: 2 * products * macs}


def test_peak_memory_is_what_is_held_at_one_time():
    def work():
        x = torch.zeros(1000, 1000)  # 4 MB
        y = torch.cat([x, x])  # 8 MB more
        del x
        return torch.cat([y, y]).sum()  # 16 MB more, 4 MB less

    assert peak_memory(work, torch.device('cpu')) == pytest.approx(24e6, rel=0.01)


def test_bench_of_our_nets_and_of_others():
    model = timm.create_model('sa_quadratic_tiny_cifar', **SMALL)
    state = copy.deepcopy(model.state_dict())
    speeds = bench(model, 16, 2, 'bfloat16', fuse=True, min_run_time=0.01)
    assert [s.path for s in speeds] == ['released algorithm', 'timm_selfconv', 'fused'] and speeds[0].ratio == 1.
    for s in speeds:
        assert (s.img_size, s.batch_size, s.dtype) == (16, 2, 'bfloat16')
        assert s.images_per_second == pytest.approx(speeds[0].images_per_second * s.ratio)
        assert s.of_gemm_limit > 0 and s.peak_memory > 0
    trained = bench(model, 64, 2, train=True, min_run_time=0.01)
    assert trained[0].peak_memory > 4 * 2 * 3 * 16 ** 4  # all explicit maps, one for each of two layers
    assert trained[1].peak_memory < trained[0].peak_memory
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and model.training

    speed, = bench(timm.create_model('resnet_tiny_cifar'), 32, 1, min_run_time=0.01)
    assert speed == Speed(
        'timm_selfconv', 32, 1, 'float32', speed.turns, speed.images_per_second, None, None, speed.peak_memory)


@pytest.mark.parametrize('train', [False, True])
def test_convit_beside_its_fused_copy(train):
    model = timm.create_model('convit_tiny', img_size=64, embed_dim=4, depth=3, local_up_to_layer=2)
    speeds = bench(model, 448, 1, train=train, min_run_time=0.01)
    assert [(s.path, s.ratio is None, s.of_gemm_limit) for s in speeds] == [
        ('timm', False, None), ('fused', False, None)]
    assert speeds[0].ratio == 1. and speeds[1].peak_memory < speeds[0].peak_memory / 5
    assert model.patch_embed.img_size == (64, 64)


@pytest.mark.parametrize('name', ['sa_quadratic_cifar', 'sa_quadratic_gen_cifar', 'sa_learned_content_cifar'])
def test_operators_and_kernels_give_the_nets_logits(name, images):
    model, x = timm.create_model(name, **SMALL), images(2, 3, 16, 16)
    seen = []
    for computed in ('operators', ''):  # without kernels, and with them
        with profile() as profiler, switched(computed):
            logits = model(x)
        seen.append((logits, any('timm_selfconv' in e.key for e in profiler.key_averages())))
    torch.testing.assert_close(seen[0][0], seen[1][0])
    assert [kernels for _, kernels in seen] == [False, True]
    speeds = bench(model, 16, 2, train=True, min_run_time=0.01, against='operators')
    assert [s.path for s in speeds] == ['operators', 'timm_selfconv'] and speeds[0].ratio == 1. and speeds[1].ratio


def test_bad_arguments_are_named():
    model = timm.create_model('sa_quadratic_tiny_cifar', **SMALL)
    for kwargs, message in ((dict(dtype='int8'), "dtype='int8'"), (dict(train=True, fuse=True), 'for inference'),
                            (dict(against='nobody'), "against='nobody': needs 'operators' or None")):
        with pytest.raises(ValueError, match=message):
            bench(model, 32, 1, **kwargs)
    with pytest.raises(ValueError, match='batch_size=0'):
        bench(model, 32, 0)
