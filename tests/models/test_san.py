import pytest
import timm
import torch
import torch.nn.functional as F
from timm.utils import freeze
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import update_bn

from held import Memory, held_at_once
from tiny_nets import shallow_net


def test_training_statistics_in_a_net_in_eval_mode_see_the_whole_batch(images):
    results = []
    for grad in (True, False):
        model = shallow_net('san_patchwise_cifar')
        model.stem_norm.train()
        with torch.set_grad_enabled(grad), held_at_once(1):
            results.append((model(images(8, 3, 32, 32).double()), model.stem_norm.running_mean))
        assert model.stem_norm.num_batches_tracked == 1
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize('name', ['san_pairwise_hier_cifar', 'san_patchwise_hier_cifar'])
def test_hierarchical_nets_are_plain_passes_with_the_first_keys(name, images):
    """The definition, with torch's own functions and the keys of the first attention handed on by hand."""
    model = shallow_net(name, channels=(32,) * 4, depths=(2,) * 4)
    for name, statistics in model.named_buffers():
        if not name.endswith('batches_tracked'):
            low = -0.5 if name.endswith('mean') else 0.5
            torch.nn.init.uniform_(statistics, low, low + 1.)

    def normed(norm, x, i):
        statistics = norm.passes[i]
        return F.batch_norm(x, statistics.running_mean, statistics.running_var, norm.weight, norm.bias).relu()

    x = images(2, 3, 5, 6).double()
    logits, features = model(x), model.forward_intermediates(x, intermediates_only=True)
    x, first = model.stem_norm(model.stem(x)).relu(), None
    for i, stage in enumerate(model.stages):
        x = stage.conv(x)
        for block in model.shared_blocks:
            inputs = normed(block.norm1, x, i)
            first = block.attn.keys(inputs) if first is None else first
            x = x + block.conv(normed(block.norm2, block.attn(inputs, first, i), i))
        x = stage.norm(x).relu()
        torch.testing.assert_close(features[i], x)
    torch.testing.assert_close(logits, model.head.fc(x.mean((2, 3))))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['san_pairwise_cifar', 'san_patchwise_hier_cifar'])
def test_training_on_128_images_stays_under_2_gib(name):
    """As the recipes train, in bfloat16, hierarchical stages recomputed. Fake tensors hold nothing."""
    with FakeTensorMode(), Memory() as memory:
        model = timm.create_model(name)
        model.set_grad_checkpointing('hier' in name)
        with torch.autocast('cpu', torch.bfloat16):
            loss = model(torch.randn(128, 3, 32, 32)).float().logsumexp(1).sum()
        loss.backward()
    assert memory.peak < 2 ** 31


@pytest.mark.parametrize('name', ['san_patchwise_cifar', 'san_pairwise_hier_cifar'])
def test_all_norms_become_synchronised_ones(name, images):
    """On one process they compute the same, also in training."""
    plain, x = shallow_net(name).train(), images(4, 3, 32, 32).double()
    converted = timm.layers.convert_sync_batchnorm(shallow_net(name)).train()
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in converted.modules())
    torch.testing.assert_close(converted(x), plain(x))
    torch.testing.assert_close(dict(converted.named_buffers()), dict(plain.named_buffers()))


def test_frozen_norms_keep_their_statistics(images):
    model, x = shallow_net('san_pairwise_hier_cifar').train(), images(4, 3, 32, 32).double()
    model(x)
    logits = model.eval()(x)
    freeze(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    torch.testing.assert_close(model.train()(x), logits)
    torch.testing.assert_close(dict(model.named_buffers()), before)


def test_update_bn_computes_the_statistics_of_every_pass(images):
    """torch.optim.swa_utils.update_bn gives the mean of the statistics of single batches."""
    batches, statistics = images(3, 2, 3, 32, 32).double(), []
    for given in (batches, *batches[:, None]):
        model = shallow_net('san_pairwise_hier_cifar').train()
        model(images(2, 3, 32, 32).double())
        update_bn(given, model)
        statistics.append({name: b for name, b in model.named_buffers() if not name.endswith('batches_tracked')})
    for name, found in statistics[0].items():
        torch.testing.assert_close(found, torch.stack([one[name] for one in statistics[1:]]).mean(0))
