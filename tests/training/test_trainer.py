"""Training on one device, against torch and timm."""
import copy
import time
import timeit
from unittest import mock

import pytest
import timm
import timm.loss
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.utils import accuracy
from torch._dynamo import register_backend

from timm_selfconv.training import augment, trainer
from timm_selfconv.training.augment import at_size
from timm_selfconv.training.trainer import compile_backend, gains_by_bfloat16
from tiny_nets import SMALL

STILL = ['hflip=0', 'opt=momentum', 'warmup_epochs=0', 'epochs=2']  # no changes
CPU, CUDA = torch.device('cpu'), torch.device('cuda')


def one_epoch(training):
    """Train the next epoch and return its loss."""
    loss = training.epoch()
    training.history.append({})
    return loss


@pytest.mark.parametrize('more,message', [
    (['batch_size=100'], r'batch_size=100: needs at most the 24 training images'),
    (['cutmix=1', 'batch_size=7'], r'batch_size=7: mixup and cutmix need a multiple of 2'),
    (['model_kwargs={num_classes: 1}'], r'labels from 0 to 1 do not fit a net with 1 classes'),
    (['train_split=nowhere'], r'nowhere'),
    (['model=sa_quadratic'], r"model='sa_quadratic', .* Unknown model"),
    (['initial_checkpoint=/etc/passwd'], r"initial_checkpoint='/etc/passwd'"),
    (['stem_whitening=0.5', 'initial_checkpoint={net}'], 'stem_whitening=0.5: needs a model from scratch'),
    (['model=crossvit_9_240', 'stem_whitening=1', 'model_kwargs={}', 'img_sizes={}'], 'stem_whitening=1.0: '),
    (['model=mixer_s32_224', 'model_kwargs={}', 'img_sizes={}', 'img_size=32'], 'img_size=32: .*requires .224, 224'),
    (['crop_padding=32', 'crop_padding_mode=reflect'], 'crop_padding=32: needs less than the image size, 32 pixels'),
    (['img_sizes={5: 18}'], r'img_sizes={5: 18}: .*multiples of 4'),
    (['--device', 'abacus'], r"device='abacus': .*abacus"),
    (['opt=adahessian'], r"opt='adahessian': needs second derivatives"),
    (['torchcompile=foo'], r"torchcompile='foo': "),
    (['device_modules=[nowhere]'], r"device_modules=\['nowhere'\]: No module"),
])
def test_recipes_that_do_not_fit_raise(tmp_path, refused, more, message):
    torch.save(timm.create_model('sa_quadratic_tiny_cifar').state_dict(), tmp_path / 'net.pth')
    refused(message, tmp_path / 'run', *(word.replace('{net}', str(tmp_path / 'net.pth')) for word in more))
    assert not (tmp_path / 'run').exists()


def test_keys_of_a_recipe_reach_images_and_net(training, monkeypatch):
    seen = []
    monkeypatch.setattr(augment, 'padded_crop', lambda x, *more: seen.append(more) or x)
    each = training('hflip=1', 'crop_padding=0', 'crop_padding_mode=reflect')
    x = each.images[:3]
    torch.testing.assert_close(each.augment(x), each.augment.normalize(x.flip(3)))
    assert seen == [(0, 'reflect')]
    erased = training('hflip=0', 'reprob=1').augment(x) != each.augment.normalize(x)
    assert erased.flatten(1).any(1).all() and not erased.all()

    each = training('drop=0.3', 'drop_path=0.2', 'cutmix=1', 'mixup=0.4', 'mixup_prob=0.7', 'grad_checkpointing=true')
    assert each.model.grad_checkpointing and not training().model.grad_checkpointing
    assert each.model.blocks[0].attn.proj_drop.p == 0.3
    assert max(m.drop_prob for m in each.model.modules() if isinstance(m, DropPath)) == pytest.approx(0.2)
    mixup = each.augment.mixup
    assert (mixup.mixup_alpha, mixup.cutmix_alpha, mixup.mix_prob) == (0.4, 1., 0.7)
    each = training('model=resnet_tiny_cifar', 'model_kwargs={}')
    each.model.patch_size = 4, 2  # timm has models with rows and columns
    assert trainer.Training(each.args, each.model, (each.images, each.labels)).grid == [8, 16]


def test_the_moving_average_is_of_the_weights(training):
    """timm's average starts with the first step."""
    each, states = training(*STILL, 'lr=0.5', 'batch_size=12', 'model_ema=true', 'model_ema_decay=0.75'), []
    each.optimizer.register_step_post_hook(lambda *_: states.append(copy.deepcopy(each.model.state_dict())))
    one_epoch(each)
    wanted = {k: torch.lerp(states[0][k], v, 0.25) for k, v in states[1].items()}
    torch.testing.assert_close(dict(each.result.state_dict()), wanted)


def test_validation_counts_in_eval_mode(training):
    each = training('drop=0.5')
    each.model.train()
    told = each.validate((each.images, each.labels))
    logits = each.model.eval()(each.augment.normalize(each.images))
    top = [float(percent) for percent in accuracy(logits, each.labels, (1, 5))]
    assert [told['eval_top1'], told['eval_top5']] == pytest.approx(top)
    assert told['eval_loss'] == pytest.approx(float(F.cross_entropy(logits, each.labels)), rel=1e-4)


@pytest.mark.slow
def test_each_image_size_is_a_graph_without_symbolic_shapes(tmp_path, run):
    images = []

    @register_backend(name='recorded')
    def record(graph, inputs):
        assert all(isinstance(size, int) for x in inputs for size in getattr(x, 'shape', [x]))
        images.extend(x.shape for x in inputs if x.dim() == 4 and x.shape[-1] > 4)  # not the stem's weight
        return graph.forward

    run(tmp_path, 'torchcompile=recorded', 'epochs=2', '--batches', '1', 'img_sizes={0: 16, 1: 32}',
        'model_kwargs={embed_dim: 8, mlp_dim: 8, depth: 1}')
    assert images == [(8, 3, 16, 16), (8, 3, 32, 32)]


def test_inductor_without_triton_falls_back(monkeypatch, capsys):
    """Only on a GPU. inductor needs no Triton on a CPU."""
    assert [compile_backend(wanted, CPU) for wanted in (None, '', 'inductor')] == [None, None, 'inductor']
    for works, backend in ((True, 'inductor'), (False, None)):
        monkeypatch.setattr(trainer, 'has_triton', lambda works=works: works)
        assert compile_backend('inductor', CUDA) == backend and compile_backend('eager', CUDA) == 'eager'
    assert capsys.readouterr().out.count('without torch.compile: inductor needs Triton') == 1


@pytest.mark.parametrize('gains', [False, True])
def test_bfloat16_is_for_devices_that_gain_by_it(gains, tmp_path, capsys, monkeypatch, run, training):
    """Also in Muon. A resumed run keeps its precision on any device."""
    newton_schulz = mock.Mock(side_effect=lambda gradient, *_, **__: gradient)
    monkeypatch.setattr(timm.optim.muon, 'zeropower_via_newtonschulz', newton_schulz)
    monkeypatch.setattr(trainer, 'gains_by_bfloat16', lambda device: gains)
    assert training('amp=true').amp is gains and not training().amp
    more = ['--batches', '1', 'epochs=2', 'amp=true', SMALL]
    assert run(tmp_path, *more, until=0)['amp'] is gains
    monkeypatch.setattr(trainer, 'gains_by_bfloat16', lambda device: not gains)
    assert run(tmp_path, *more)['amp'] is gains
    assert capsys.readouterr().out.count('trains in float32: this device') == (0 if gains else 2)
    seen = {call.kwargs.get('dtype', torch.bfloat16) for call in newton_schulz.mock_calls}
    assert seen == {torch.bfloat16 if gains else torch.float32}


def test_gpus_that_do_not_emulate_bfloat16_and_faster_cpus_gain_by_it(monkeypatch):
    """This CPU is timed with another size and timer than the trainer's, if the difference is clear."""
    for native in (True, False):  # a T4 emulates it
        monkeypatch.setattr(
            torch.cuda, 'is_bf16_supported', lambda including_emulation, native=native: including_emulation or native)
        assert gains_by_bfloat16(CUDA) is native
    assert gains_by_bfloat16(torch.device('meta'))
    whole, half = (torch.ones(768, 768, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    times = [min(timeit.repeat(lambda x=x: x @ x, number=1, timer=time.process_time)) for x in (whole, half)]
    ratio = times[0] / times[1]
    if not 0.7 < ratio < 1.4:
        assert gains_by_bfloat16(CPU) is (ratio > 1)


def test_one_step_equals_torch_s_optimiser(training):
    """Without augmentation, and with all images in one batch, so that their order does not matter."""
    training = training(*STILL, 'lr=0.5', 'sched_on_updates=true', 'batch_size=24', 'clip_grad=0.1')
    args = training.args
    torch.manual_seed(args.seed)
    model = timm.create_model('sa_quadratic_tiny_cifar', embed_dim=8, mlp_dim=8, depth=2)
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=0, atol=0)

    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith('encoding.centers')]
    rest = [p for n, p in model.named_parameters() if p.dim() <= 1 or n.endswith('encoding.centers')]
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0.)]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    criterion = timm.loss.LabelSmoothingCrossEntropy(args.smoothing)
    loss = criterion(model(training.augment.normalize(training.images)), training.labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()

    assert one_epoch(training) == pytest.approx(loss.item(), rel=1e-5)
    assert training.optimizer.param_groups[0]['lr'] == pytest.approx(0.25)  # half of the cosine
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)


def test_the_hardest_half_has_the_highest_losses(training, monkeypatch):
    """From its first epoch on, by the loss of each image at the given size, within the usual batches."""
    training = training('epochs=2', 'batch_size=9', 'img_sizes={0: 32}', 'hardest_half={1: 16}', SMALL)
    training.loss = mock.Mock(wraps=training.loss)
    one_epoch(training)
    assert [len(call.args[0]) for call in training.loss.mock_calls] == [9, 9]
    monkeypatch.setattr(augment.Augment, '__call__', lambda self, x: x / 255)
    training.loss.reset_mock()
    state = copy.deepcopy(training.model.state_dict())
    one_epoch(training)
    seen = [call.args for call in training.loss.mock_calls]
    assert [(len(x), size) for x, _, size in seen] == [(5, 32), (5, 32)]
    training.model.load_state_dict(state)
    torch.manual_seed(training.args.seed + 2000)
    drawn = torch.randperm(24)[:9]
    images, labels = training.images[drawn] / 255, training.labels[drawn]
    losses = [F.cross_entropy(training.model(at_size(x[None], 16)), y[None]).item() for x, y in zip(images, labels)]
    order = sorted(range(9), key=losses.__getitem__, reverse=True)[:5]
    torch.testing.assert_close(seen[0][:2], (images[order], labels[order]))


def test_choosing_the_hardest_half_leaves_statistics_mode_and_gradients(training, monkeypatch):
    """Autocast of older torch versions caches weights without gradients."""
    monkeypatch.setattr(trainer, 'gains_by_bfloat16', lambda device: True)
    training = training('model=resnet_tiny_cifar', 'model_kwargs={}', 'amp=true', 'epochs=2', 'hardest_half={0: 16}')
    net = training.model.train()
    before = copy.deepcopy(net.state_dict())
    training.hardest_half(training.images / 255, training.labels, 16)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in net.modules())
    one_epoch(training)
    assert all(p.grad is not None and p.grad.any() for n, p in net.named_parameters() if 'weight' in n)
    assert not any(torch.equal(before[n], p) for n, p in net.named_parameters() if 'weight' in n)


def test_the_stem_begins_with_whitened_patches_of_the_first_size(training):
    training = training('stem_whitening=0.5', 'img_sizes={0: 16}')
    images = at_size(training.augment.normalize(training.images), 16)
    out = training.model.stem(images).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), torch.zeros(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.cov(), 0.25 * torch.eye(8), rtol=0, atol=1e-2)


def test_small_images_first_and_validation_at_full_size(training):
    training, seen = training('img_sizes={1: 16, 3: 24}', 'epochs=5'), []
    training.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    for _ in range(4):
        one_epoch(training)
        training.validate((training.images, training.labels))
    assert seen == [32] * 4 + [16, 16, 16, 32] * 2 + [24, 24, 24, 32]


@pytest.mark.parametrize('off,mixed', [(0, [True, True]), (1, [True, False])])
def test_images_are_mixed_until_an_epoch(off, mixed, training):
    """From then on, a frozen net has the loss of unmixed images. 0 means never, as in timm."""
    plain, ours = (
        [one_epoch(each) for _ in range(2)] for each in (
            training(*STILL, 'lr=1e-12'), training(*STILL, 'lr=1e-12', 'cutmix=1', f'mixup_off_epoch={off}')))
    assert [abs(a - b) > 1e-5 * a for a, b in zip(plain, ours)] == mixed
