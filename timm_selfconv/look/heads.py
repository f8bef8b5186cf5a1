"""Statistics of heads, and how convolutional each layer is."""
from dataclasses import dataclass
from itertools import count
from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from PIL import Image
from tabulate import tabulate
from timm.models._input import get_model_input_config
from tqdm import tqdm

from timm_selfconv import theory
from timm_selfconv.data import preprocess
from .attention_maps import attention_layers, look_at_windows, looks_at_content, position_gates

__all__ = ['HeadReport', 'LayerReport', 'format_heads', 'report_heads']

Tap = Tuple[int, int]


@dataclass(frozen=True)
class HeadReport:
    """Statistics of one head, in pixels of the layer's grid, means over interior queries, windows and images.

    Attributes:
        head: Number, from 0.
        center: Mean offset of the attention from the query, (row, column).
        spread: Standard deviation of the attention.
        distance: Mean distance of the attention from the query.
        entropy: In nats.
        largest: Largest probability.
        consistency: Share of the pattern that stays as the query moves, over all queries. None for attention by
            position only, which has 1.
        constancy: Share of the attention that two images have in common. None by position only, or for one image.
        symmetry: Share of the pattern that equals its mirror image, left-right and up-down, over all queries.
        nearest_tap: Tap of the kernel with the most attention, (row, column).
        on_tap: Attention to that tap.
        acts_as_tap: True if that tap gets more than half at every interior query of every image.
        gate: Attention to position in ConViT, the rest goes to content; None for other attention.
    """
    head: int
    center: Tuple[float, float]
    spread: float
    distance: float
    entropy: float
    largest: float
    consistency: Optional[float]
    constancy: Optional[float]
    symmetry: Tuple[float, float]
    nearest_tap: Tap
    on_tap: float
    acts_as_tap: bool
    gate: Optional[float]


@dataclass(frozen=True)
class LayerReport:
    """Distance of a layer from convolutions, and its heads.

    Attributes:
        layer: Number, from 0, in forward order.
        grid: Rows and columns of the grid, or of a window.
        windows: Number of windows, 1 for the whole grid.
        residual: Distance from expressing every convolution, see :class:`timm_selfconv.theory.ConvResidual`.
        shared_residual: The same with one set of coefficients for all queries and images.
        overlap: Share of attention that two heads have in common; None for a single head.
        taps: Taps that heads act as, each once.
        heads: Reports of the heads.
        kernel: The convolution that the layer learned: heads with a fixed offset, near or far.
    """
    layer: int
    grid: Tuple[int, int]
    windows: int
    residual: float
    shared_residual: float
    overlap: Optional[float]
    taps: List[Tap]
    heads: List[HeadReport]
    kernel: theory.LearnedKernel


def report_layer(
        layer: int, maps: torch.Tensor, kernel_size: int, by_position: bool, gates: Optional[Sequence[float]],
) -> LayerReport:
    """Report on a layer from its attention maps, shape (B, windows, heads, H, W, H, W)."""
    def mean(values: torch.Tensor) -> List[float]:
        return theory.interior(values, kernel_size).mean((0, 1, -2, -1)).tolist()

    theory.interior(maps[0, 0, 0, ..., 0, 0], kernel_size)  # raises if the kernel does not fit
    offsets: List[Tap] = [(i, j) for i, j in theory.tap_offsets(kernel_size).tolist()]
    on_taps = theory.interior(theory.at_taps(maps, kernel_size), kernel_size)  # (B, windows, heads, taps, H, W)
    acting = (on_taps.amin((0, 1, -2, -1)) > 0.5).any(-1).tolist()
    on_tap, nearest = (t.tolist() for t in on_taps.mean((0, 1, -2, -1)).max(-1))
    centers = zip(*(mean(c) for c in theory.center_of_mass(maps).unbind(-1)))
    nothing = [None] * len(acting)
    consistency = nothing if by_position else theory.translation_consistency(maps).mean((0, 1)).tolist()
    constancy = nothing if by_position or len(maps) == 1 else mean(theory.overlap(maps, 0)[None])
    symmetries = zip(*(theory.mirror_symmetry(maps, dim).mean((0, 1)).tolist() for dim in (-1, -2)))
    heads = [HeadReport(*statistics) for statistics in zip(
        range(len(acting)), centers, mean(theory.spread(maps)), mean(theory.mean_distance(maps)),
        mean(theory.entropy(maps)), mean(maps.amax((-2, -1))), consistency, constancy, symmetries,
        [offsets[tap] for tap in nearest], on_tap, acting, gates or nothing)]
    residual = theory.conv_residual(maps, kernel_size)
    taps = sorted({h.nearest_tap for h in heads if h.acts_as_tap})
    overlap = None if len(acting) == 1 else float(theory.interior(theory.overlap(maps), kernel_size).mean())
    return LayerReport(
        layer, (maps.shape[-2], maps.shape[-1]), maps.shape[1], residual.layer, residual.shared, overlap, taps, heads,
        theory.learned_kernel(maps))


def report_maps(model: nn.Module, images: torch.Tensor, kernel_size: int) -> List[LayerReport]:
    """Like :func:`report_heads`, for preprocessed images, shape (B, C, height, width)."""
    by_position = not looks_at_content(model)
    gates = iter(position_gates(model))
    numbers = count()  # shared layers have several maps, but no gates
    with tqdm(total=len(attention_layers(model)), desc='heads', unit='layer', leave=False, disable=None) as bar:
        def look(maps: torch.Tensor) -> LayerReport:
            bar.update()
            return report_layer(next(numbers), maps, kernel_size, by_position, next(gates, None))
        return look_at_windows(model, images, look)


def check_input(model: nn.Module, images: Optional[torch.Tensor], content: bool) -> torch.Tensor:
    """Return the images, or any image for a net that attends by position only; else raise a ValueError."""
    if images is not None:
        return images
    if content:
        raise ValueError('images: needs at least one picture, because the attention of this net depends on content')
    return next(model.parameters()).new_zeros(1, *get_model_input_config(model)['input_size'])


def report_heads(
        model: nn.Module,
        images: Optional[Sequence[Image.Image]] = None,
        kernel_size: int = 3,
) -> List[LayerReport]:
    """Report on all heads of a net.

    Args:
        model: Net with a timm configuration that :func:`attention_maps` can read.
        images: Pictures, preprocessed as the configuration says; not needed for attention by position only.
        kernel_size: Side of the convolutions to compare with.

    Returns:
        One report per layer, in forward order.

    Raises:
        ValueError: If the attention cannot be read, pictures are missing for a net that looks at content, or the
            kernel does not fit in the grid.
    """
    batch = check_input(model, preprocess(model, images) if images else None, looks_at_content(model))
    return report_maps(model, batch, kernel_size)


def tap_text(tap: Tap) -> str:
    return '({},{})'.format(*(f'{offset:+d}' if offset else '0' for offset in tap))


def number_text(value: Any) -> str:
    return '' if value is None else ', '.join(f'{x:.2f}' for x in (value if isinstance(value, tuple) else (value,)))


def format_heads(layers: List[LayerReport], kernel_size: int) -> str:
    """Format :func:`report_heads` as text."""
    names = ['gate', 'spread', 'distance', 'entropy', 'largest', 'consistency', 'constancy', 'symmetry', 'on_tap']
    names = [name for name in names if getattr(layers[0].heads[0], name) is not None]
    grids = len({(layer.grid, layer.windows) for layer in layers}) > 1
    heads, summary, kernels = [], [], []
    for layer in layers:
        heads += [{
            'layer': '' if head.head else layer.layer,
            'head': head.head,
            'centre': '{:+.2f}, {:+.2f}'.format(*(round(c, 2) + 0. for c in head.center)),  # no -0.00
            **{name.replace('_', ' '): number_text(getattr(head, name)) for name in names},
            'tap': tap_text(head.nearest_tap) if head.acts_as_tap else '',
        } for head in layer.heads]
        summary.append({
            'layer': layer.layer,
            **({'windows': '{2} of {0} x {1}'.format(*layer.grid, layer.windows)} if grids else {}),
            'residual': f'{layer.residual:.3f}',
            'shared': f'{layer.shared_residual:.3f}',
            'distance': f'{sum(head.distance for head in layer.heads) / len(layer.heads):.2f}',
            'overlap': number_text(layer.overlap),
            'heads that are taps': f'{sum(head.acts_as_tap for head in layer.heads)} of {len(layer.heads)}',
            'distinct taps covered': ' '.join(map(tap_text, layer.taps)) or 'none'})
        kernels.append({
            'layer': layer.layer,
            'heads of a fixed offset': f'{len(layer.kernel.fixed)} of {len(layer.heads)}',
            'reach': number_text(layer.kernel.reach),
            'residual to these': '' if layer.kernel.residual is None else f'{layer.kernel.residual:.3f}',
            'distinct offsets': ' '.join(map(tap_text, layer.kernel.taps)) or 'none'})
    text = '\n\n'.join(tabulate(
        rows, headers='keys', disable_numparse=True, colalign=(*['right'] * (len(rows[0]) - 1), 'left'),
        maxcolwidths=[*[None] * (len(rows[0]) - 1), 40]) for rows in (heads, summary, kernels))
    k = f'{kernel_size} x {kernel_size}'
    return text + '\n\n' + (
        "Centre (row, column from the query), spread and distance in pixels of the layer's grid, entropy in nats;\n"
        f'means over queries with their {k} neighbourhood on the grid. Consistency: 1 if a head does the same at all\n'
        'queries, as position-only heads do; constancy: 1 if it does the same in every image. Symmetry: 1 if\n'
        'left mirrors right, and up down. On tap: attention to one offset of that neighbourhood; a head is a tap\n'
        'if every query gives that more than half. Residual: 0 if at each query the maps of the heads span all taps\n'
        f'of a {k} convolution, 1 if none; shared: the same with value matrices that all queries share. Overlap:\n'
        'attention that two heads have in common. Heads of a fixed offset give one pixel, near or far, more than half\n'
        'at every query from which it is on the grid; residual to these: of convolutions with these taps, shared.' + (
            '\nGate: attention to position, the rest to content.' if 'gate' in names else '') + (
            "\nA layer that attends in windows is judged in each: no tap crosses its border."
            if any(layer.windows > 1 for layer in layers) else ''))
