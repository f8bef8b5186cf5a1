"""Benchmarks against the released algorithm or timm's, and against a net's own matrix products, in one run."""
import contextlib
import copy
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.convit import ConVit
from torch.profiler import ProfilerActivity, profile

from timm_selfconv import theory
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.kernels.kernel import switched
from timm_selfconv.models import FusedConVit, SelfAttentionNet

__all__ = [
    'ReleasedAttention', 'Speed', 'bench', 'bench_nets', 'gemm_limit', 'peak_memory', 'released', 'time_interleaved']


class ReleasedAttention(nn.Module):
    """A layer as the papers' code computes it: all probabilities, the product with the input, two Linear layers.

    https://github.com/epfml/attention-cnn: scores of every query for every key, a softmax over the keys' two axes, and
    one einsum of probabilities (heads, H, W, H, W), or with content (B, heads, H, W, H, W), with the hidden states.
    """

    def __init__(self, attn: SelfAttention2d):
        """
        Args:
            attn: The layer, whose parameters are used.
        """
        super().__init__()
        self.attn = attn

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Attend; x and the result have shape (B, H, W, dim)."""
        attn, (batch, height, width, dim) = self.attn, x.shape
        shape = height, width, attn.num_heads, dim
        scores, query = x.new_zeros(height, width, 1, 1), None
        encoded = attn.encoding(x) if attn.absolute else x
        if attn.query is not None:
            query = attn.query(encoded).view(batch, *shape).permute(0, 3, 1, 2, 4) * attn.scale
        if attn.relative:
            rows, cols, cross = attn.encoding(query, height, width)
            scores = rows[..., :, None] + cols[..., None, :] + (0. if cross is None else cross)
        if attn.key is not None:
            keys = (attn.key(encoded).view(batch, *shape).permute(0, 3, 1, 2, 4) if key is None else
                    key.unflatten(2, (height, width)))
            if 'content' in attn.terms:
                scores = scores + torch.einsum('bhijd,bhkld->bhijkl', query, keys)
            if attn.key_bias is not None:
                scores = scores + torch.einsum('hd,bhkld->bhkl', attn.key_bias * attn.scale, keys)[:, :, None, None]
        probs = scores.flatten(-2).softmax(dim=-1).view(scores.shape)
        probs = attn.attn_drop(probs).to(x.dtype)
        if len(probs) == 1:
            gathered = torch.einsum('hijkl,bkld->bijhd', probs[0], x)
        else:
            gathered = torch.einsum('bhijkl,bkld->bijhd', probs, x)
        return attn.proj_drop(attn.proj(attn.value(gathered.reshape(batch, height, width, -1))))

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`SelfAttention2d.keys`."""
        return self.attn.keys(x)


def released(model: SelfAttentionNet) -> SelfAttentionNet:
    """A copy of a net that computes the same by the released algorithm, through torch's own Linear layers."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn = ReleasedAttention(block.attn)
    return model


@dataclass(frozen=True)
class Speed:
    """Measured speed of one way to compute a net.

    Attributes:
        path: 'released algorithm', 'operators', the net's own 'timm_selfconv' (of timm's ConViT 'timm'), or 'fused'.
        img_size: Side of the images, in pixels.
        batch_size: Images a batch.
        dtype: 'float32' or 'bfloat16'.
        turns: How often it was timed.
        images_per_second: By the median time of a batch.
        ratio: Images a second over those of the first path; None where there is one only.
        of_gemm_limit: Images a second over those of the net's Linear products only, see :func:`gemm_limit`.
        peak_memory: Most bytes that tensors made meanwhile held at one time, see :func:`peak_memory`.
    """
    path: str
    img_size: int
    batch_size: int
    dtype: str
    turns: int
    images_per_second: float
    ratio: Optional[float]
    of_gemm_limit: Optional[float]
    peak_memory: int


def time_interleaved(steps: Sequence[Callable[[], Any]], min_run_time: float = 1.0) -> Tuple[List[float], int]:
    """Time functions, taking turns. Each should have been called before: first calls allocate.

    Args:
        steps: The functions.
        min_run_time: Seconds that each is run for, at least, and three times; but no turn begins after ten times as
            long, where calls are slow.

    Returns:
        Median seconds per call, one per function, and the number of turns.
    """
    seconds: List[List[float]] = [[] for _ in steps]
    begin, turns = time.perf_counter(), 0
    while turns == 0 or (
            (turns < 3 or min(map(sum, seconds)) < min_run_time) and time.perf_counter() < begin + 10 * min_run_time):
        for function, times in zip(steps, seconds):
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        turns += 1
    return [statistics.median(times) for times in seconds], turns


def bench_nets(models: Sequence[nn.Module], images: torch.Tensor, min_run_time: float = 1.0) -> List[float]:
    """Time the eval forwards of nets, taking turns on the same images.

    Args:
        models: The nets; they are left in eval mode.
        images: Images that all of them take, shape (B, C, height, width).
        min_run_time: See :func:`time_interleaved`.

    Returns:
        Median seconds per batch, one per net.
    """
    steps = [step(model, images, train=False) for model in models]
    with torch.inference_mode():
        for function in steps:
            function()
        return time_interleaved(steps, min_run_time)[0]


def step(model: nn.Module, images: torch.Tensor, train: bool) -> Callable[[], Any]:
    """An eval forward, or forward, cross-entropy and backward in training mode; the optimiser is left out."""
    model.train(train)
    if not train:
        return lambda: model(images)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def training_step() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(images).float(), labels).backward()
    return training_step


def gemm_limit(model: nn.Module, images: torch.Tensor, train: bool) -> Callable[[], Any]:
    """Only a net's Linear products, on buffers of their shapes: forward, in training both gradients too."""
    products: List[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def note(module: nn.Linear, args: Tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rows = args[0].numel() // module.in_features
        shapes = (rows, module.in_features), (module.out_features, module.in_features), (rows, module.out_features)
        x, weight, y = map(images.new_ones, shapes)
        products.append((x, weight, y))

    model = copy.deepcopy(model).to('meta')
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(images.to('meta'))

    def multiply() -> None:
        for x, weight, y in products:
            F.linear(x, weight)
            if train:
                y @ weight
                y.T @ x
    return multiply


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that what a function makes holds at one time.

    On a GPU by torch's count, elsewhere by what its profiler sees allocated and freed: no buffers inside of kernels.
    """
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # it reports each start, and the lack of a GPU, as errors
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def bench(
        model: nn.Module,
        img_size: int,
        batch_size: int,
        dtype: str = 'float32',
        train: bool = False,
        fuse: bool = False,
        min_run_time: float = 3.0,
        against: Optional[str] = None,
) -> List[Speed]:
    """Time a net, the released algorithm and the net's own matrix products, all taking turns.

    Args:
        model: The net; it is copied and left as it is. Only a :class:`SelfAttentionNet` has a released algorithm and
            consists of Linear layers; timm's ConViT is timed beside its fused copy, others by themselves.
        img_size: Side of the square images, in pixels.
        batch_size: Images a batch.
        dtype: 'float32' or 'bfloat16', of the net and the images.
        train: Time forward, cross-entropy and backward instead of eval forwards.
        fuse: Time the net fused by :func:`timm_selfconv.fuse` too.
        min_run_time: See :func:`time_interleaved`.
        against: 'operators' to time the net by the definition of its layers, operator by operator, factors included and
            kernels left out, instead of the released algorithm.

    Returns:
        Speeds: the released algorithm's (if there is one) or that of ``against``, the net's, the fused net's
        (if asked for).

    Raises:
        ValueError: If an argument is out of range, or the net does not take images of this size.
    """
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"dtype={dtype!r}: needs 'float32' or 'bfloat16'")
    if batch_size < 1:
        raise ValueError(f'batch_size={batch_size}: needs at least 1')
    if against not in (None, 'operators'):
        raise ValueError(f"against={against!r}: needs 'operators' or None")
    if fuse and train:
        raise ValueError('fuse=True and train=True: a fused net is for inference, choose one of them')
    net: Any = copy.deepcopy(model).to(getattr(torch, dtype))
    convit = type(net) is ConVit
    if convit:
        FusedConVit.set_input_size(net, img_size)  # on square images timm's takes it as well
        for layer in net.modules():
            if hasattr(layer, 'rel_indices'):
                layer.rel_indices = None  # were they replaced meanwhile, torch's profiler would complain
    elif hasattr(net, 'set_input_size'):
        net.set_input_size(img_size=img_size)
    first = next(net.parameters())
    images = torch.randn(batch_size, net.in_chans, img_size, img_size, device=first.device, dtype=first.dtype)

    in_linears = released(net) if isinstance(net, SelfAttentionNet) else None
    steps: Dict[str, Callable[[], Any]] = {}
    if against is not None:
        steps[against] = switched(against)(step(net, images, train))
    elif in_linears is not None:
        steps['released algorithm'] = step(in_linears, images, train)
    ours = type(net).__module__.startswith('timm_selfconv')
    steps['timm_selfconv' if ours else 'timm'] = step(net, images, train)
    if convit or fuse:
        steps['fused'] = step(theory.fuse(net), images, train)
    limits = [gemm_limit(in_linears, images, train)] if in_linears is not None else []
    with contextlib.nullcontext() if train else torch.inference_mode():
        try:  # these are the first calls, too
            memory = [peak_memory(function, first.device) for function in [*steps.values(), *limits]]
        except (AssertionError, RuntimeError) as e:
            if ours:
                raise
            raise ValueError(f'img_size={img_size}: {type(net).__name__} does not take it ({e})') from e
        seconds, turns = time_interleaved([*steps.values(), *limits], min_run_time)
    return [
        Speed(path, img_size, batch_size, dtype, turns, batch_size / s,
              seconds[0] / s if len(steps) > 1 else None, seconds[-1] / s if limits else None, held)
        for path, s, held in zip(steps, seconds, memory)]
