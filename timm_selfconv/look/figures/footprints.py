"""Weights of vector attention over its footprint (report, Fig. 18 and 19)."""
from typing import Sequence

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from .maps import draw_rows
from .style import styled

__all__ = ['figure_footprints']

COLORS = 'PuOr'  # diverging, safe for colour-blind readers; same as the explorer
MOST_MAPS = 16


@styled
def figure_footprints(weights: Sequence[torch.Tensor], names: Sequence[str], small: str = '', net: str = '') -> Figure:
    """Mean weights over the footprint, a bottleneck per row, a weight map per column, all on one scale.

    Args:
        weights: Weights of each bottleneck, mean over queries and images, shape (maps, K, K). The first 16 maps are
            drawn. White is 0, or 1 / K^2 for pairwise weights, which sum to 1 over the footprint.
        names: Names of the bottlenecks, from :func:`timm_selfconv.look.attention_maps.layer_names`.
        small: More small print.
        net: Name of the net, for the title.
    """
    shown = f'the first {MOST_MAPS} weight maps; ' if max(map(len, weights)) > MOST_MAPS else ''
    signed = min(float(w.min()) for w in weights) < 0
    neutral = 'zero' if signed else 'what equal weights would be'
    middle = 0. if signed else 1 / weights[0][0].numel()
    norm = CenteredNorm(middle, max(float((w - middle).abs().max()) for w in weights))
    return draw_rows(
        [w[:MOST_MAPS] for w in weights], names, ScalarMappable(norm, COLORS), 'weight of a pixel of the footprint',
        'Weights over the footprint',
        f'{small}{shown}mean over all queries; a weight map serves a share of the channels; white: {neutral}',
        net)
