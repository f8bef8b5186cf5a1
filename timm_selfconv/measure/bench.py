"""Speed of a net, of the released algorithm of the paper, and of the Linear products alone, measured in turn."""
import copy
import itertools
import statistics
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.models import SelfAttentionNet

__all__ = ['bench', 'gemm_limit', 'released', 'time_interleaved']


class ReleasedAttention(nn.Module):
    """A layer as in https://github.com/epfml/attention-cnn: all probabilities, one einsum, two Linear layers."""

    def __init__(self, attn: SelfAttention2d):
        super().__init__()
        self.attn, self.keys = attn, attn.keys

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        attn = self.attn
        shared = attn.query is None and attn.key is None  # all images have the same map
        probs = attn.attention_probs(x, key)
        probs = attn.attn_drop(probs[0] if shared else probs).to(x.dtype)
        gathered = torch.einsum(f"{'' if shared else 'b'}hijkl,bkld->bijhd", probs, x)
        return attn.proj_drop(attn.proj(attn.value(gathered.flatten(3))))


def released(model: SelfAttentionNet) -> SelfAttentionNet:
    """Return a copy of a net with the released algorithm."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn = ReleasedAttention(block.attn)
    return model


def time_interleaved(steps: Sequence[Callable[[], Any]], min_run_time: float = 1.0) -> List[float]:
    """Return the median seconds per call of functions that are called in turn.

    After a first turn, turns repeat until they take ``min_run_time`` seconds per function.
    """
    seconds: List[List[float]] = []
    while len(seconds) < 2 or sum(map(sum, seconds[1:])) < min_run_time * len(steps):
        marks = [time.perf_counter()]
        for step in steps:
            step()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            marks.append(time.perf_counter())
        seconds.append([end - start for start, end in itertools.pairwise(marks)])
    return [statistics.median(times) for times in zip(*seconds[1:])]  # first calls allocate


def gemm_limit(model: SelfAttentionNet, images: torch.Tensor, train: bool) -> Callable[[], Any]:
    """Return a function that computes only the Linear products of a net, in training also of both gradients."""
    model, products = released(model), []
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        layer.register_forward_hook(lambda m, x, y: products.append((m.weight, x[0].flatten(0, -2), y.flatten(0, -2))))
    torch.no_grad()(model)(images)

    @torch.no_grad()
    def multiply() -> None:
        for weight, x, y in products:
            F.linear(x, weight)
            if train:
                y @ weight
                y.T @ x
    return multiply


def bench(
        model: nn.Module, img_size: int, batch_size: int, dtype: str, train: bool = False, min_run_time: float = 3.,
) -> List[Dict[str, Any]]:
    """Time a copy of a net on square images: inference, or forward, cross-entropy and backward if ``train``.

    Returns:
        A row per algorithm. For a :class:`SelfAttentionNet` the first row is the released algorithm, and ``ratio`` is
        the speed relative to it.
    """
    net: Any = copy.deepcopy(model).to(getattr(torch, dtype)).train(train)
    ours = isinstance(net, SelfAttentionNet)
    if hasattr(net, 'set_input_size'):
        net.set_input_size(img_size=img_size)
    images = next(net.parameters()).new_ones(batch_size, net.in_chans, img_size, img_size).normal_()
    paths = {'released algorithm': released(net), 'timm_selfconv': net} if ours else {type(net).__name__: net}

    def step(net: nn.Module) -> None:
        logits = net(images)
        if train:
            net.zero_grad()
            F.cross_entropy(logits.float(), logits.argmax(1)).backward()

    steps = [partial(step, path) for path in paths.values()] + ([gemm_limit(net, images, train)] if ours else [])
    with torch.cuda.device_of(images), torch.inference_mode(not train):  # synchronize() waits for the current device
        seconds = time_interleaved(steps, min_run_time)
    return [dict(
        path=path, img_size=img_size, batch_size=batch_size, dtype=dtype, images_per_second=batch_size / s,
        ratio=seconds[0] / s, of_gemm_limit=seconds[-1] / s if ours else None) for path, s in zip(paths, seconds)]
