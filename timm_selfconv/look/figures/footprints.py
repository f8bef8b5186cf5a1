"""Weights of vector attention over its footprint (report, Fig. 18 and 19)."""
from typing import Sequence

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import TEXT_WIDTH, TITLE_HEIGHT, frameless, head_style, styled, titled_figure

__all__ = ['figure_footprints']

COLORS = 'PuOr'  # as the explorer has it: two-sided, white in the middle, apart for the colour-blind
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
            drawn. The scale's middle is 0, or 1 / K^2 for pairwise weights, which sum to 1 over the footprint.
        names: Of the bottlenecks, from :func:`timm_selfconv.look.attention_maps.layer_names`. 'pass 1, block 0' is the
            block that stands in 'pass 0, block 0' too: both get a bar of one colour.
        small: More of the small print.
        net: Which net it is, for the title.
    """
    columns = min(MOST_MAPS, max(len(w) for w in weights))
    left, bar = 0.85, 0.42
    cell = min((TEXT_WIDTH - left - 0.04) / columns, 0.5)
    left += (TEXT_WIDTH - left - columns * cell) / 3
    first = TITLE_HEIGHT + 0.22
    total = first + len(weights) * cell + bar
    names = names or [f'bottleneck {row}' for row in range(len(weights))]
    blocks = sorted({name.split(', ')[1] for name in names if ', ' in name})
    shown = f'the first {MOST_MAPS}; ' if max(len(w) for w in weights) > MOST_MAPS else ''
    shared = 'rows with a bar of one colour: one shared block; ' if blocks else ''
    signed = min(float(w.min()) for w in weights) < 0
    neutral = 'zero' if signed else 'what equal weights would be'
    middle = 0. if signed else 1 / weights[0][0].numel()
    figure = titled_figure(
        total, 'Weights over the footprint', f'{small}{shared}mean over all queries; white: {neutral}', net)
    figure.text(
        (left + columns * cell / 2) / TEXT_WIDTH, 1 - (TITLE_HEIGHT + 0.02) / total,
        f'weight map, each of a share of the channels {f"({shown[:-2]})" if shown else ""}', ha='center', va='top',
        fontsize=6)
    norm = CenteredNorm(middle, max(float((w - middle).abs().max()) for w in weights))
    for row, (name, layer) in enumerate(zip(names, weights)):
        top = first + row * cell
        figure.text(
            (left - 0.12) / TEXT_WIDTH, 1 - (top + 0.45 * cell) / total, name, ha='right', va='center', fontsize=6)
        if ', ' in name:
            color, _ = head_style(blocks.index(name.split(', ')[1]))
            figure.patches.append(Rectangle(
                ((left - 0.08) / TEXT_WIDTH, 1 - (top + 0.9 * cell) / total), 0.03 / TEXT_WIDTH, 0.9 * cell / total,
                color=color, transform=figure.transFigure))
        for column, image in enumerate(layer[:MOST_MAPS]):
            ax = figure.add_axes((
                (left + column * cell) / TEXT_WIDTH, 1 - (top + 0.9 * cell) / total, 0.9 * cell / TEXT_WIDTH,
                0.9 * cell / total))
            ax.imshow(image.numpy(), cmap=COLORS, norm=norm, interpolation='nearest')
            frameless(ax)
            if row == 0 or column >= max(len(w) for w in weights[:row]):
                ax.set_title(f'{column}', fontsize=5, pad=1.5)
    bar_axes = figure.add_axes((0.3, 0.24 / total, 0.4, 0.06 / total))
    figure.colorbar(ScalarMappable(norm, COLORS), cax=bar_axes, orientation='horizontal').set_label(
        'weight of a pixel of the footprint', fontsize=6, labelpad=0)
    bar_axes.tick_params(pad=1)
    return figure
