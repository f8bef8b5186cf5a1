"""Weights of vector attention over its footprint (report, Fig. 18 and 19)."""
from typing import Sequence

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from .style import TEXT_WIDTH, TITLE_HEIGHT, frameless, styled, titled_figure

__all__ = ['figure_footprints']

COLORS = 'PuOr'  # two-sided, white in the middle, apart for the colour-blind
MOST_MAPS = 16


@styled
def figure_footprints(weights: Sequence[torch.Tensor], small: str = '') -> Figure:
    """Mean weights over the footprint, a bottleneck a row, a weight map a column, all on one scale.

    Args:
        weights: Weights of each bottleneck, mean over queries and images, shape (maps, K, K). The first 16 maps are
            drawn. The scale's middle is 0, or 1 / K^2 for pairwise weights, which sum to 1 over the footprint.
        small: More of the small print.
    """
    columns = min(MOST_MAPS, max(len(w) for w in weights))
    left, bar = 0.62, 0.42
    cell = min((TEXT_WIDTH - left - 0.04) / columns, 0.5)
    first = TITLE_HEIGHT + 0.12
    total = first + len(weights) * cell + bar
    shown = f'the first {MOST_MAPS} weight maps; ' if max(len(w) for w in weights) > MOST_MAPS else ''
    signed = min(float(w.min()) for w in weights) < 0
    neutral = 'zero' if signed else 'what equal weights would be'
    middle = 0. if signed else 1 / weights[0][0].numel()
    figure = titled_figure(
        total, 'Weights over the footprint', f'{small}{shown}mean over all queries; white: {neutral}')
    norm = CenteredNorm(middle, max(float((w - middle).abs().max()) for w in weights))
    for row, layer in enumerate(weights):
        top = first + row * cell
        figure.text(
            (left - 0.08) / TEXT_WIDTH, 1 - (top + 0.45 * cell) / total, f'bottleneck {row}', ha='right', va='center',
            fontsize=6)
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
