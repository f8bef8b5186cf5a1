"""How much faster the paths of attention are than the explicit map they stand for, measured in one run."""
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.utils.benchmark import Timer

from timm_selfconv.models import SelfAttentionNet
from .attention_maps import explicit_maps

__all__ = ['PathTimes', 'bench_paths']


@dataclass(frozen=True)
class PathTimes:
    """Median seconds a batch through the explicit maps and through the path that runs by default."""
    dense: float
    fused: float

    @property
    def ratio(self) -> float:
        return self.dense / self.fused


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
    timer = Timer(
        'model(images)', globals=dict(model=model, images=images), num_threads=torch.get_num_threads())
    with torch.inference_mode():
        with explicit_maps(model):
            dense = timer.blocked_autorange(min_run_time=min_run_time).median
        fused = timer.blocked_autorange(min_run_time=min_run_time).median
    return PathTimes(dense, fused)
