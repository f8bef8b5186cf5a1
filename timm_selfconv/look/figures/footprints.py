"""Weights of vector attention over its footprint (report, Fig. 18 and 19)."""
from typing import Sequence

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from .maps import draw_rows
from .style import head_style, styled

__all__ = ['figure_footprints']

COLORS = 'PuOr'  # diverging, safe for colour-blind readers; same as the explorer
MOST_MAPS = 16


@styled
def figure_footprints(
        weights: Sequence[torch.Tensor],
        names: Sequence[str] = (),
        small: str = '',
        net: str = '',
) -> Figure:
    """Mean weights over the footprint, a bottleneck per row, a weight map per column, all on one scale.

    Args:
        weights: Weights of each bottleneck, mean over queries and images, shape (maps, K, K). The first 16 maps are
            drawn. White is 0, or 1 / K^2 for pairwise weights, which sum to 1 over the footprint.
        names: Names of the bottlenecks, from :func:`timm_selfconv.look.attention_maps.layer_names`. A shared block has
            a bar of the same colour in each pass.
        small: More small print.
        net: Name of the net, for the title.
    """
    names = names or [f'bottleneck {row}' for row in range(len(weights))]
    blocks = sorted({name.split(', ')[1] for name in names if ', ' in name})
    shown = f'the first {MOST_MAPS} weight maps; ' if max(map(len, weights)) > MOST_MAPS else ''
    shared = 'rows with a bar of one colour: one shared block; ' if blocks else ''
    signed = min(float(w.min()) for w in weights) < 0
    neutral = 'zero' if signed else 'what equal weights would be'
    middle = 0. if signed else 1 / weights[0][0].numel()
    norm = CenteredNorm(middle, max(float((w - middle).abs().max()) for w in weights))
    figure = draw_rows(
        [w[:MOST_MAPS] for w in weights], names, ScalarMappable(norm, COLORS), 'weight of a pixel of the footprint',
        'Weights over the footprint',
        f'{small}{shown}{shared}mean over all queries; a weight map serves a share of the channels; white: {neutral}',
        net)
    ax = figure.axes[0]
    for row, name in enumerate(names):
        if ', ' in name:
            color, _ = head_style(blocks.index(name.split(', ')[1]))
            top, bottom = ((row + part) / len(names) * ax.get_ylim()[0] for part in (0.17, 0.97))
            ax.plot([-0.06, -0.06], [top, bottom], color=color, linewidth=2, solid_capstyle='butt', clip_on=False)
    return figure
