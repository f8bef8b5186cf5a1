"""Which net, or which path of attention, is how much faster, measured in one run."""
import statistics
from dataclasses import dataclass
from typing import List, Sequence

import torch
import torch.nn as nn
from torch.utils.benchmark import Timer

from timm_selfconv.models import SelfAttentionNet
from timm_selfconv.look.attention_maps import explicit_maps

__all__ = ['PathTimes', 'bench_nets', 'bench_paths']


@dataclass(frozen=True)
class PathTimes:
    """Median seconds a batch through the explicit maps and through the path that runs by default."""
    dense: float
    fused: float

    @property
    def ratio(self) -> float:
        return self.dense / self.fused


def timer(model: nn.Module, images: torch.Tensor) -> Timer:
    """A timer of a net's forward, on all threads that torch has been given."""
    return Timer('model(images)', globals=dict(model=model, images=images), num_threads=torch.get_num_threads())


def bench_nets(models: Sequence[nn.Module], images: torch.Tensor, min_run_time: float = 1.0) -> List[float]:
    """Time the eval forwards of nets, taking turns on the same images.

    Args:
        models: The nets; they are left in eval mode.
        images: Images that all of them take, shape (B, C, height, width).
        min_run_time: Seconds that each net is run for, at least.

    Returns:
        Median seconds a batch, one a net.
    """
    timers = [timer(model.eval(), images) for model in models]
    seconds: List[List[float]] = [[] for _ in models]
    with torch.inference_mode():
        for turn in timers:
            turn.timeit(1)  # first calls allocate
        while min(map(sum, seconds)) < min_run_time:
            for turn, times in zip(timers, seconds):
                times.append(turn.timeit(1).median)
    return [statistics.median(times) for times in seconds]


def bench_paths(
        model: nn.Module,
        img_size: int,
        batch_size: int = 8,
        min_run_time: float = 1.0,
) -> PathTimes:
    """Time a net's eval forward with explicit attention maps and without, one after the other on the same images.

    Args:
        model: A :class:`SelfAttentionNet`; it is left in eval mode and at that image size.
        img_size: Side of the square images, in pixels.
        batch_size: Images a batch.
        min_run_time: Seconds that each path is run for.

    Returns:
        Median times of both paths.

    Raises:
        ValueError: If it is another kind of net.
    """
    if not isinstance(model, SelfAttentionNet):
        raise ValueError(f'model={type(model).__name__}: needs a SelfAttentionNet')
    model.eval()
    model.set_input_size(img_size)
    images = torch.randn(batch_size, model.in_chans, img_size, img_size)
    forward = timer(model, images)
    with torch.inference_mode():
        with explicit_maps(model):
            dense = forward.blocked_autorange(min_run_time=min_run_time).median
        fused = forward.blocked_autorange(min_run_time=min_run_time).median
    return PathTimes(dense, fused)
