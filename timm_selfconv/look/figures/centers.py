"""Centres and extents of heads around a query (paper, Fig. 3, 4, 12, 14; report, Fig. 2).

Heads with a quadratic encoding are drawn as Gaussians on an unbounded plane; near a border the remaining pixels share
the attention. For other heads the map itself is drawn, as the fewest pixels that hold half of the attention.
"""
import cmath
import math
from pathlib import Path
from typing import Collection, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle

from timm_selfconv.theory import Blobs, position_blobs
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from .maps import Grid, queries_of
from .style import HALO, TEXT_WIDTH, head_style, styled, titled_figure

__all__ = ['figure_centers', 'figure_regions', 'figure_training', 'layer_panels', 'training_blobs']

GAUSSIAN = (
    'numbered dot: centre of a head, hollow if beyond the edge; solid: 50 % of its Gaussian, dotted: 90 %; hollow grey '
    'dot: a head that attends to all pixels nearly alike')
KEY = 'cross: the query; grey: the grid around it'
Point = Tuple[float, float]  # column and row
CONTOURS = ((0.5, '-'), (0.9, ':'))  # share of attention, line style
EVERYWHERE = 0.4  # share of pixels that hold half of the attention; 0.5 for uniform attention
SHARPEST = 1e-12  # least variance in pixels^2; the variances in a history are rounded, also to 0
FINE = 8  # steps to a pixel along the line around a region
MARGIN = 1.25  # pixels around the grid, for centres outside


def half(attention: torch.Tensor) -> torch.Tensor:
    """1 on the fewest pixels that hold half of a map, and on those that tie, else 0, shape (H, W)."""
    attention = attention.cpu().double()
    values = attention.flatten().sort(descending=True).values
    return (attention >= values[(values.cumsum(0) < values.sum() / 2).sum()]).double()


def gaussian_map(
        center: torch.Tensor, variances: torch.Tensor, axes: torch.Tensor, grid: Grid, query: Grid) -> torch.Tensor:
    rows, cols = (torch.arange(n) - q for n, q in zip(grid, query))
    away = (torch.cartesian_prod(rows, cols) - center) @ axes
    return (away.square() / variances).sum(-1).div(-2).softmax(-1).view(grid)


def training_blobs(model: nn.Module, run: Union[str, Path]) -> Tuple[Dict[float, List[Blobs]], Grid]:
    """Gaussians of the heads during a training, from its history.

    Args:
        model: The trained net; it is not changed.
        run: Folder of a run, or name of a net with a history.

    Returns:
        For each number of epochs trained, in order, the Gaussians of each layer; the grid. At most six epochs: the
        first, the last, and four that are dense at the start, where heads move most.

    Raises:
        ValueError: If the history is missing, it belongs to another net, or it has no positions of heads.
    """
    path = find_history(run)
    if path is None:
        raise ValueError(f'run={str(run)!r}: needs a net with a shipped history, or a folder with {HISTORY}')
    history = read_history(path)
    rows = [row for row in history['rows'] if row['heads']]
    if not rows or not history['grid']:
        raise ValueError(f'{path}: has no positions of heads: the attention of {history["model"]} depends on the image')
    grid, name = (history['grid'][0], history['grid'][1]), history['model'].partition('.')[0]
    own = getattr(model, 'pretrained_cfg', {}).get('architecture', name)
    heads = [len(layer.centers) for layer in position_blobs(model, grid) or ()]
    if own != name or any([len(layer) for layer in row['heads']] != heads for row in rows):
        raise ValueError(f'{path}: belongs to the net {name}, not to {own}')
    blobs, last = {}, len(rows) - 1
    for number in sorted({0, last, *(min(last, round(last ** (k / 4))) for k in range(4))}):
        layers = [torch.tensor(layer, dtype=torch.double) for layer in rows[number]['heads']]
        blobs[rows[number]['epochs']] = [Blobs(x[:, :2], x[:, [2, 4, 4, 3]].view(-1, 2, 2)) for x in layers]
    return blobs, grid


def draw_grid(ax: Axes, grid: Grid, query: Grid, margin: float) -> Rectangle:
    left, top = -query[1] - 0.5, -query[0] - 0.5
    border = Rectangle((left, top), grid[1], grid[0], facecolor='0.965', edgecolor='0.6', linewidth=0.5, zorder=-2)
    ax.add_patch(border)
    ax.plot(0, 0, marker='+', color='black', markersize=6, markeredgewidth=0.8, linestyle='', zorder=4)
    ax.set(aspect='equal', xlim=(left - margin, left + grid[1] + margin),
           ylim=(top + grid[0] + margin, top - margin))  # rows run downwards
    for axis, q, n in ((ax.yaxis, query[0], grid[0]), (ax.xaxis, query[1], grid[1])):
        axis.set_ticks([t for t in range(-q, n - q) if t % max(1, n // 4) == 0])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return border


def to_edge(ax: Axes, col: float, row: float) -> Point:
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    return min(max(col, left), right), min(max(row, top), bottom)


def label_place(dot: complex, dots: Collection[complex], labels: Sequence[complex], size: float) -> complex:
    """Place of the number of a dot, in points: the first on three rings that is free, else the freest one."""
    def room(place: complex) -> float:
        return min([1., *(abs(place - label) / size for label in labels),
                    *(abs(place - other) / (0.75 * size) for other in dots)])

    angles = [math.pi / 8 + turn * math.pi / 4 for turn in range(8)]
    return max([dot + cmath.rect(far * size, angle) for far in (0.9, 1.7, 2.5) for angle in angles], key=room)


def draw_dots(ax: Axes, border: Rectangle, points: Sequence[Point], wide: Sequence[int], size: float = 5) -> None:
    """A numbered dot per head, hollow at the edge for points outside, and a list of heads that attend everywhere."""
    box = ax.get_window_extent()
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    scale = min(box.width / (right - left), box.height / (bottom - top)) * 72 / ax.figure.dpi  # points to a pixel
    shown = {head: to_edge(ax, *point) for head, point in enumerate(points) if head not in wide}
    dots = {head: complex(x, -y) * scale for head, (x, y) in shown.items()}
    labels: List[complex] = []
    for head, (x, y) in shown.items():
        labels.append(label_place(dots[head], dots.values(), labels, size))
        offset = labels[-1] - dots[head]
        color, marker = head_style(head)
        ax.plot(x, y, color=color, marker=marker, markersize=size / 2, clip_on=False, zorder=3,
                fillstyle='full' if (x, y) == points[head] else 'none')
        ax.annotate(
            str(head), (x, y), (offset.real, offset.imag), textcoords='offset points', color=color, fontsize=size,
            weight='bold', ha='center', va='center', zorder=4, path_effects=HALO).set_in_layout(False)
    if wide:
        corner = border.get_x(), border.get_y() + border.get_height()
        ax.annotate(f'everywhere: {", ".join(map(str, wide))}', corner, (0, -1.5), textcoords='offset points', va='top',
                    color='0.45', fontsize=4.5).set_in_layout(False)


def draw_blobs(ax: Axes, blobs: Blobs, grid: Grid, size: float = 5) -> None:
    """One layer: contours of Gaussians around the middle of the grid, clipped at its border."""
    query = grid[0] // 2, grid[1] // 2
    border = draw_grid(ax, grid, query, MARGIN)
    wide, points = [], [(col, row) for row, col in blobs.centers.tolist()]
    for head, (center, covariance) in enumerate(zip(blobs.centers, blobs.covariances)):
        variances, axes = torch.linalg.eigh(covariance)
        variances = variances.clamp(min=SHARPEST)
        if half(gaussian_map(center, variances, axes, grid, query)).mean() > EVERYWHERE:
            wide.append(head)
            ax.plot(*to_edge(ax, *points[head]), color='0.6', marker='o', fillstyle='none', markersize=size / 2,
                    clip_on=False)
            continue
        short, long = variances.sqrt().tolist()
        angle = math.degrees(math.atan2(axes[0, 1], axes[1, 1]))  # from the column axis to the long one
        for share, line in CONTOURS:
            diameter = 2 * math.sqrt(-2 * math.log1p(-share))  # in standard deviations
            ax.add_patch(ellipse := Ellipse(
                points[head], diameter * long, diameter * short, angle=angle, fill=False,
                edgecolor=head_style(head)[0], linestyle=line, linewidth=0.8))
            ellipse.set_clip_path(border)
    draw_dots(ax, border, points, wide, size)


def draw_regions(ax: Axes, attention: torch.Tensor, query: Grid) -> None:
    """Maps of one query, shape (heads, H, W): a line around half of each, a dot at its largest pixel."""
    border = draw_grid(ax, (attention.shape[1], attention.shape[2]), query, 0.5)
    wide, points = [], []
    for head, image in enumerate(attention):
        row, col = divmod(int(image.argmax()), image.shape[1])
        points.append((col - query[1], row - query[0]))
        region = half(image)
        if region.mean() > EVERYWHERE:
            wide.append(head)
            continue
        region = torch.nn.functional.pad(region, (1, 1, 1, 1))
        size = [FINE * (n - 1) + 1 for n in region.shape]  # in steps of a fraction of a pixel, for a smooth line
        smooth = torch.nn.functional.interpolate(region[None, None], size, mode='bicubic', align_corners=True)[0, 0]
        rows, cols = (torch.arange(n) / FINE - 1 - q for n, q in zip(size, query))
        inset = 0.35 + 0.3 * head / len(attention)  # so that lines around the same pixels do not overlap
        ax.contour(
            cols.numpy(), rows.numpy(), smooth.numpy(), [inset], colors=[head_style(head)[0]], linewidths=0.8)
    draw_dots(ax, border, points, wide)


def layer_panels(layers: int, title: str, small: str, net: str, share: bool = True) -> Tuple[Figure, List[Axes]]:
    """A figure with a panel for each layer, three in a row; panels with one grid share axes."""
    columns = min(3, layers)
    rows = math.ceil(layers / columns)
    figure = titled_figure(rows * TEXT_WIDTH / 3 * 0.97 + 0.2, title, small, net)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flat)
    for ax in axes[layers:]:
        ax.remove()
    for number, ax in enumerate(axes[:layers]):
        ax.set(title=f'layer {number}', xlabel='column offset [pixels]', ylabel='row offset [pixels]')
        if share:
            ax.label_outer()
    return figure, axes[:layers]


@styled
def figure_centers(layers: Sequence[Blobs], grids: Sequence[Grid], net: str = '') -> Figure:
    """Centres and extents of all heads, relative to the query (paper, Fig. 4, 12, 14).

    Args:
        layers: Gaussians of each layer, from :func:`position_blobs`.
        grids: Rows and columns of each layer; the query is in the middle.
        net: Name of the net, for the title.
    """
    figure, axes = layer_panels(
        len(layers), 'Where the heads look', f'{GAUSSIAN}; {KEY}', net, len(set(grids)) == 1)
    for ax, blobs, grid in zip(axes, layers, grids):
        draw_blobs(ax, blobs, grid)
    return figure


@styled
def figure_regions(maps: List[torch.Tensor], query: Optional[Grid] = None, small: str = '', net: str = '') -> Figure:
    """Like :func:`figure_centers` for any heads: the highest-density region of each map.

    Args:
        maps: Attention maps of each layer, shape (heads, H, W, H, W).
        query: Row and column of the query; the middle by default.
        small: More small print.
        net: Name of the net, for the title.

    Raises:
        ValueError: If the query is not on the grid.
    """
    queries = queries_of(maps, query)
    i, j = queries[0]
    figure, axes = layer_panels(
        len(maps), f'Where the heads look from row {i}, column {j}',
        f'{small}line: around the fewest pixels that hold half of the attention; numbered dot: a head, in its largest '
        f'pixel; {KEY}', net, len({m.shape[-2:] for m in maps}) == 1)
    for ax, layer, own in zip(axes, maps, queries):
        draw_regions(ax, layer[:, own[0], own[1]], own)
    return figure


@styled
def figure_training(history: Dict[float, List[Blobs]], grid: Grid, net: str = '') -> Figure:
    """Centres of attention over training, a layer per row, an epoch per column (paper, Fig. 3; report, Fig. 2).

    Args:
        history: From :func:`training_blobs`.
        grid: Rows and columns of the layers.
        net: Name of the net, for the title.
    """
    layers = len(next(iter(history.values())))
    side = TEXT_WIDTH / max(4, len(history))
    figure = titled_figure(
        0.85 * layers * side + 0.2, 'Where the heads look, over training, offsets in pixels', f'{GAUSSIAN}; {KEY}', net)
    axes = figure.subplots(layers, len(history), squeeze=False, sharex=True, sharey=True)
    for column, (epochs, blobs) in enumerate(history.items()):
        for row, layer in enumerate(blobs):
            draw_blobs(axes[row, column], layer, grid, 4)
            axes[row, column].tick_params(labelsize=5)
            axes[row, 0].set_ylabel(f'layer {row}')
        axes[0, column].set_title(f'{epochs:.3g} epoch{"" if epochs == 1 else "s"}' if epochs else 'untrained')
    return figure
