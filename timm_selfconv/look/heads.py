"""What the heads of a net do, and how convolutional its layers are."""
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from PIL import Image
from tabulate import tabulate
from timm.models._input import get_model_input_config

from timm_selfconv import theory
from timm_selfconv.data import preprocess
from .attention_maps import attention_maps, looks_at_content

__all__ = ['HeadReport', 'LayerReport', 'format_heads', 'report_heads']

Tap = Tuple[int, int]


@dataclass(frozen=True)
class HeadReport:
    """What one head does, in pixels of the layer's grid, means over interior queries and over images.

    Attributes:
        head: Its number, from 0.
        center: Mean offset of its attention from the query, (row, column).
        spread: Standard deviation of its attention.
        distance: Mean distance of its attention from the query.
        entropy: In nats.
        largest: Largest probability.
        consistency: How much of its pattern stays as the query moves, from 0 to 1; over all queries. None where it is 1
            by construction, as attention by position alone is.
        symmetry: How much of its pattern is its mirror image, left for right, from 0 to 1; over all queries.
        nearest_tap: The kernel's tap that it gives most to, (row, column).
        on_tap: What it gives to that tap.
        acts_as_tap: Whether it gives that tap more than half at every interior query of every image.
    """
    head: int
    center: Tuple[float, float]
    spread: float
    distance: float
    entropy: float
    largest: float
    consistency: Optional[float]
    symmetry: float
    nearest_tap: Tap
    on_tap: float
    acts_as_tap: bool


@dataclass(frozen=True)
class LayerReport:
    """How convolutional a layer is.

    Attributes:
        layer: Its number, from 0, in the order they run.
        residual: Its distance from expressing every convolution, see :class:`timm_selfconv.theory.ConvResidual`.
        shared_residual: The same with one set of coefficients for all queries and images.
        taps: Taps that heads act as, each once.
        heads: Its heads.
    """
    layer: int
    residual: float
    shared_residual: float
    taps: List[Tap]
    heads: List[HeadReport]


def report_layer(layer: int, maps: torch.Tensor, kernel_size: int, by_position: bool = False) -> LayerReport:
    """Report on a layer from its attention maps, shape (B, heads, H, W, H, W), made by position alone or not."""
    def mean(values: torch.Tensor) -> List[float]:
        return theory.interior(values, kernel_size).mean((0, -2, -1)).tolist()

    theory.interior(maps[0, 0, ..., 0, 0], kernel_size)  # refuses a kernel that does not fit before its taps are made
    offsets: List[Tap] = [(i, j) for i, j in theory.tap_offsets(kernel_size).tolist()]
    acting = theory.acting_taps(maps, kernel_size).any(-1).tolist()
    on_taps = theory.interior(theory.at_taps(maps, kernel_size), kernel_size).mean((0, -2, -1))
    on_tap, nearest = (t.tolist() for t in on_taps.max(-1))
    rows, cols = (mean(c) for c in theory.center_of_mass(maps).unbind(-1))
    spread, distance = mean(theory.spread(maps)), mean(theory.mean_distance(maps))
    entropy, largest = mean(theory.entropy(maps)), mean(theory.largest_probability(maps))
    consistency = [None] * len(acting) if by_position else theory.translation_consistency(maps).mean(0).tolist()
    symmetry = theory.mirror_symmetry(maps).mean(0).tolist()
    heads = [
        HeadReport(
            head, (rows[head], cols[head]), spread[head], distance[head], entropy[head], largest[head],
            consistency[head], symmetry[head], offsets[nearest[head]], on_tap[head], acting[head])
        for head in range(len(acting))]
    residual = theory.conv_residual(maps, kernel_size)
    taps = sorted({h.nearest_tap for h in heads if h.acts_as_tap})
    return LayerReport(layer, residual.layer, residual.shared, taps, heads)


def report_maps(model: nn.Module, images: torch.Tensor, kernel_size: int) -> List[LayerReport]:
    """:func:`report_heads` for images as the net takes them, shape (B, C, height, width)."""
    by_position = not looks_at_content(model)
    return [
        report_layer(i, maps, kernel_size, by_position) for i, maps in enumerate(attention_maps(model, images))]


def report_heads(
        model: nn.Module,
        images: Optional[Sequence[Image.Image]] = None,
        kernel_size: int = 3,
) -> List[LayerReport]:
    """Report on all heads of a net.

    Args:
        model: Net with a timm configuration, whose attention :func:`attention_maps` can read.
        images: Pictures to look at, preprocessed as the configuration says; a net that attends by position alone needs
            none.
        kernel_size: Side of the convolutions to compare with.

    Returns:
        One report per layer, in the order they run.

    Raises:
        ValueError: If its attention can't be read, there are no pictures for a net that looks at content, or the
            kernel does not fit in the grid.
    """
    if images:
        batch = preprocess(model, images)
    elif looks_at_content(model):
        raise ValueError('images: this net looks at content, so what its heads do depends on the pictures; name some')
    else:
        batch = torch.zeros(1, *get_model_input_config(model)['input_size'])
    return report_maps(model, batch, kernel_size)


def tap_text(tap: Tap) -> str:
    return '({},{})'.format(*(f'{offset:+d}' if offset else '0' for offset in tap))


def format_heads(layers: List[LayerReport], kernel_size: int) -> str:
    """:func:`report_heads` for people."""
    numbers = ['spread', 'distance', 'entropy', 'largest', 'consistency', 'symmetry', 'on tap']
    if layers[0].heads[0].consistency is None:
        numbers.remove('consistency')
    heads = tabulate(
        [(
            '' if head.head else layer.layer, head.head,
            '{:+.2f}, {:+.2f}'.format(*(round(c, 2) + 0. for c in head.center)),  # no -0.00
            *(f'{getattr(head, name.replace(" ", "_")):.2f}' for name in numbers),
            tap_text(head.nearest_tap) if head.acts_as_tap else '',
        ) for layer in layers for head in layer.heads],
        headers=('layer', 'head', 'centre', *numbers, 'tap'),
        disable_numparse=True,
        colalign=(*['right'] * (3 + len(numbers)), 'left'),
    )
    summary = tabulate(
        [(
            layer.layer, f'{layer.residual:.3f}', f'{layer.shared_residual:.3f}',
            f'{sum(head.distance for head in layer.heads) / len(layer.heads):.2f}',
            f'{sum(head.acts_as_tap for head in layer.heads)} of {len(layer.heads)}',
            ' '.join(tap_text(tap) for tap in layer.taps) or 'none',
        ) for layer in layers],
        headers=('layer', 'residual', 'shared', 'distance', 'heads that are taps', 'distinct taps covered'),
        disable_numparse=True,
        colalign=(*['right'] * 5, 'left'),
        maxcolwidths=[None] * 5 + [40],
    )
    k = f'{kernel_size} x {kernel_size}'
    return f'{heads}\n\n{summary}\n\n' + (
        "Centre (row, column from the query), spread and distance in pixels of the layer's grid, entropy in nats;\n"
        f'means over queries whose {k} neighbourhood is on the grid. Consistency: 1 if a head does the same at every\n'
        'query, as all do that know positions alone. Symmetry: 1 if left mirrors right. On tap: what a head gives to\n'
        'one offset of that neighbourhood; it is a tap if every query gives that more than half. Residual: 0 if at\n'
        f'each query the maps of the heads span all taps of a {k} convolution, 1 if none; shared: the same with\n'
        'value matrices that all queries share.')
