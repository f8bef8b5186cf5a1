"""Maps, a layer per row and a head per column.

Attention maps (paper, Fig. 5 to 10; report, Fig. 3, 4, 8, 20 to 23) and weights of vector attention over its footprint
(report, Fig. 18 and 19).
"""
import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm, LinearSegmentedColormap, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from timm_selfconv.theory import mean_distance
from .style import HALO, MAP_COLORS, TEXT_WIDTH, head_style, styled, titled_figure

__all__ = ['figure_average', 'figure_footprints', 'figure_query', 'queries_of']

Grid = Tuple[int, int]
RED = '#b2182b'  # of maps over a picture; more attention is more opaque
HEAD_LINE, LETTER = 0.12, 0.055  # inches: line above a panel, and a letter of a row's name
MOST_COLUMNS = 16  # more heads take several lines
COVERED = 0.99  # quantile of an average at the end of the colour scale


def queries_of(maps: Sequence[torch.Tensor], query: Optional[Grid]) -> List[Grid]:
    """A query of the first layer's grid, by default the middle, at the same place on each layer's grid."""
    height, width = maps[0].shape[-2:]
    i, j = query or (height // 2, width // 2)
    if not (0 <= i < height and 0 <= j < width):
        raise ValueError(f'query={(i, j)}: needs a row and a column on the grid of {height} x {width}')
    return [(i * m.shape[-2] // height, j * m.shape[-1] // width) for m in maps]


def cut_out(attention: torch.Tensor, query: Grid, window: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(attention, (window // 2,) * 4, value=torch.nan)
    return padded[..., query[0]:query[0] + window, query[1]:query[1] + window]


def draw_image(ax: Axes, image: Any, extent: Sequence[float], **kwargs: Any) -> None:
    left, right, bottom, top = extent
    ax.imshow(np.asarray(image), extent=(left, right, bottom, top), interpolation='nearest', **kwargs)
    ax.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor='0.55', linewidth=0.3))


def frame(ax: Axes, extent: Sequence[float], grid: Sequence[int], cell: Grid) -> None:
    left, right, bottom, top = extent
    h, w = (bottom - top) / grid[0], (right - left) / grid[1]
    ax.add_patch(Rectangle(
        (left + cell[1] * w, top + cell[0] * h), w, h, fill=False, edgecolor='black', linewidth=0.6, path_effects=HALO))


def draw_rows(
        rows: Sequence[torch.Tensor],
        names: Sequence[str],
        colors: ScalarMappable,
        label: str,
        title: str,
        small: str,
        net: str,
        orders: Sequence[Sequence[int]] = (),
        marks: Sequence[Grid] = (),
        picture: Optional[torch.Tensor] = None,
        over: bool = False,
) -> Figure:
    """Draw images, shape (heads, h, w) per layer, on one colour scale. Layers with many heads take several lines.

    For attention, ``orders`` has the order of the heads, each drawn with its largest value; ``marks`` has a pixel to
    frame for each layer. The picture, shape (height, width, 3), is above the maps, and with ``over`` below each map.
    """
    most, letters = max(map(len, rows)), max(map(len, names))
    columns = math.ceil(most / math.ceil(most / MOST_COLUMNS))
    lines = [math.ceil(len(row) / columns) for row in rows]
    inches = min((TEXT_WIDTH - 0.1 - LETTER * letters) / columns, 0.75)  # width of a panel
    height, width = rows[0].shape[-2:]
    side, ratio, head_line = 0.95, height / width, HEAD_LINE / inches
    body = sum(lines) * (inches * ratio + HEAD_LINE) + 0.45
    figure = titled_figure(body + (0. if picture is None else 1.), title, small, net)
    if picture is None:
        ax = figure.subplots()
    else:
        (top_ax, ax), box = figure.subplots(2, 1, height_ratios=(1., body)), (-0.5, width - 0.5, height - 0.5, -0.5)
        draw_image(top_ax, picture, box)
        if marks:
            frame(top_ax, box, (height, width), marks[0])
        top_ax.axis('off')
    above: Any = dict(fontsize=5 if columns <= 12 else 4, va='bottom')
    start = 0
    for number, (row, name) in enumerate(zip(rows, names)):
        middle = (start + (lines[number] - 1) / 2) * (ratio + head_line) + head_line + ratio / 2
        ax.text(-0.12, middle, name, ha='right', va='center')
        for place, head in enumerate(orders[number] if orders else range(len(row))):
            line, column = divmod(place, columns)
            top = (start + line) * (ratio + head_line) + head_line
            image, extent = row[head].numpy(), (column, column + side, top + side * ratio, top)
            look: Any = dict(cmap=colors.cmap, norm=colors.norm)
            if picture is not None and over:
                draw_image(ax, 0.45 + 0.55 * picture.mean(-1), extent, cmap='gray', vmin=0., vmax=1.)
                look = dict(cmap=ListedColormap([RED]), alpha=np.clip(colors.norm(image), 0, 1))
            draw_image(ax, image, extent, **look)
            if marks:
                frame(ax, extent, row.shape[-2:], marks[number])
            if orders:
                largest, (color, marker) = float(row[head].nan_to_num(0.).max()), head_style(head)
                share = f'{largest:.{2 if largest >= 0.095 else 3}f}'.lstrip('0')
                ax.plot(column + 0.05, top - 0.3 * head_line, color=color, marker=marker, markersize=3)
                ax.text(column + 0.05 + 0.035 / inches, top, str(head), weight='bold', **above)
                ax.text(column + side, top, share, ha='right', color='0.25', **above)
            else:
                ax.text(column + side / 2, top, str(head), ha='center', **above)
        start += lines[number]
    ax.set(xlim=(-LETTER * letters / inches, columns), ylim=(start * (ratio + head_line), 0.), aspect='equal')
    ax.axis('off')
    figure.colorbar(colors, ax=ax, location='bottom', shrink=0.5, aspect=50, pad=0.01).set_label(label, fontsize=6)
    return figure


def draw_maps(
        rows: Sequence[torch.Tensor],
        title: str,
        small: str,
        net: str,
        most: Optional[float] = None,
        orders: Optional[Sequence[Sequence[int]]] = None,
        over: bool = False,
        **kwargs: Any,
) -> Figure:
    """Maps of heads, see :func:`draw_rows`, in their own order by default, on colours up to ``most``."""
    top_value = most or max(float(row.nan_to_num(0.).max()) for row in rows) or 1.
    cmap = LinearSegmentedColormap.from_list('over', ['white', RED]) if over else colormaps[MAP_COLORS]
    norm = PowerNorm(0.5, 0., top_value, clip=True)  # the root makes small shares visible
    label = 'attention, square-root scale of colours, the same for all panels'
    if most is not None:
        label += f'; the largest {100 * (1 - COVERED):.0f} % share its end'
    figure = draw_rows(
        rows, [f'layer {number}' for number in range(len(rows))], ScalarMappable(norm, cmap.with_extremes(bad='0.8')),
        label, title, f'{small}above each panel: its head, its largest value', net,
        orders or [range(len(row)) for row in rows], over=over, **kwargs)
    figure.axes[-1].set_xticks(ticks := [part * top_value for part in (0., 1 / 16, 1 / 4, 9 / 16, 1.)],
                               [f'{tick:.2g}' for tick in ticks])
    return figure


@styled
def figure_query(
        maps: Sequence[torch.Tensor],
        query: Optional[Tuple[int, int]] = None,
        window: Optional[int] = None,
        small: str = '',
        picture: Optional[torch.Tensor] = None,
        over: bool = False,
        net: str = '',
) -> Figure:
    """Attention of one query, a layer per row, a head per column; the query is framed (paper, Fig. 5 to 10).

    Args:
        maps: Attention maps of each layer, shape (heads, H, W, H, W), of one image or a mean over images.
        query: Row and column of the query on the first layer's grid; the middle by default.
        window: Side of a square around the query to zoom in on, odd (7 in the paper), with the most local head first.
            Grey is outside the grid.
        small: More small print.
        picture: Input of the net, shape (height, width, 3), values from 0 to 1.
        over: Draw the maps over the picture in grey, as the papers do.
        net: Name of the net, for the title.

    Raises:
        ValueError: If the query is not on the grid, or the window's side is not odd.
    """
    queries = marks = queries_of(maps, query)
    rows, orders = [layer[:, i, j] for layer, (i, j) in zip(maps, queries)], None
    title = 'Attention of the query in row {}, column {}'.format(*queries[0])
    if window is not None:
        if window < 1 or window % 2 == 0:
            raise ValueError(f'window={window!r}: needs an odd number of pixels')
        small = f'{window} x {window} pixels around it, the most local head first; {small}'
        rows = [cut_out(attention, own, window) for attention, own in zip(rows, queries)]
        orders = [mean_distance(m)[:, i, j].argsort(stable=True).tolist() for m, (i, j) in zip(maps, queries)]
        marks = [(window // 2, window // 2)] * len(rows)
    return draw_maps(rows, title, small, net, orders=orders, marks=marks, picture=picture, over=over)


@styled
def figure_average(
        maps: Sequence[torch.Tensor],
        small: str = '',
        picture: Optional[torch.Tensor] = None,
        net: str = '',
) -> Figure:
    """Attention that each pixel receives, mean over all queries (report, equation 4 and Fig. 8, 20 to 23).

    Each head's values sum to 1, as in the report's released code; uniform attention gives 1 / (H W) everywhere.

    Args:
        maps: For each layer attention maps, shape (heads, H, W, H, W).
        small: More small print.
        picture: Input of the net, shape (height, width, 3), values from 0 to 1.
        net: Name of the net, for the title.
    """
    rows = [layer.mean((-4, -3)) for layer in maps]
    most = float(torch.cat([row.flatten() for row in rows]).quantile(COVERED))  # a bright corner hides the rest
    title = 'Attention that each pixel receives, mean over all queries'
    return draw_maps(rows, title, small, net, most, picture=picture)


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
    shown = f'the first {MOST_COLUMNS} weight maps; ' if max(map(len, weights)) > MOST_COLUMNS else ''
    signed = min(float(w.min()) for w in weights) < 0
    neutral = 'zero' if signed else 'the value of equal weights'
    middle = 0. if signed else 1 / weights[0][0].numel()
    norm = CenteredNorm(middle, max(float((w - middle).abs().max()) for w in weights))
    return draw_rows(
        [w[:MOST_COLUMNS] for w in weights], names, ScalarMappable(norm, 'PuOr'), 'weight of a pixel of the footprint',
        'Weights over the footprint',
        f'{small}{shown}mean over all queries; a weight map serves a share of the channels; white: {neutral}',
        net)
