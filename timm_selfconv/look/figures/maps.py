"""Attention maps, a layer per row and a head per column (paper, Fig. 5 to 10; report, Fig. 3, 4, 8, 20 to 23)."""
from typing import List, Optional, Sequence, Tuple

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from timm_selfconv.theory import mean_distance
from .style import MAP_COLORS, TEXT_WIDTH, TITLE_HEIGHT, frameless, head_style, styled, titled_figure

__all__ = ['average_attention', 'by_locality', 'figure_average', 'figure_query', 'query_attention']

SCALE = 'above each panel: its head, its largest value'
Grid = Tuple[int, int]
HALO = [withStroke(linewidth=1.2, foreground='white')]  # a black frame shows on bright pixels, its halo on dark ones


def check_query(query: Optional[Tuple[int, int]], grid: Grid) -> Tuple[int, int]:
    """A query on a grid, the middle one by default.

    Raises:
        ValueError: If it lies elsewhere.
    """
    i, j = query or (grid[0] // 2, grid[1] // 2)
    if not (0 <= i < grid[0] and 0 <= j < grid[1]):
        raise ValueError(f'query={(i, j)}: needs a row and a column on the grid of {grid[0]} x {grid[1]}')
    return i, j


def average_attention(maps: torch.Tensor) -> torch.Tensor:
    """The report's average attention: what each key pixel receives, a mean over all queries.

    Equation (4) as the report's released code computes it: the sum over queries divided by their number H W, so each
    head's picture sums to 1, as one query's map does, and a head that looks everywhere alike is 1 / (H W) throughout.

    Args:
        maps: Attention maps, shape (..., H, W, H, W), query before key.

    Returns:
        Shape (..., H, W).
    """
    return maps.mean((-4, -3))


def query_attention(
        maps: torch.Tensor,
        query: Optional[Tuple[int, int]] = None,
        window: Optional[int] = None,
) -> torch.Tensor:
    """What one query looks at.

    Args:
        maps: Attention maps, shape (..., H, W, H, W).
        query: Its row and column; the middle by default.
        window: Side of a square around the query to cut out, odd; the whole grid by default.

    Returns:
        Shape (..., H, W) or (..., window, window), there NaN outside the grid.

    Raises:
        ValueError: If the query is not on the grid, or the window's side not odd.
    """
    height, width = maps.shape[-2:]
    i, j = check_query(query, (height, width))
    attention = maps[..., i, j, :, :]
    if window is None:
        return attention
    if window < 1 or window % 2 == 0:
        raise ValueError(f'window={window!r}: needs an odd number of pixels')
    side = window // 2
    padded = torch.nn.functional.pad(attention, (side,) * 4, value=torch.nan)
    return padded[..., i:i + window, j:j + window]


def by_locality(maps: torch.Tensor, query: Optional[Tuple[int, int]] = None) -> List[int]:
    """Heads in order of how far from a query they look on average, the most local one first.

    Args:
        maps: Attention maps of a layer, shape (heads, H, W, H, W).
        query: Row and column of the query; the middle by default.
    """
    i, j = check_query(query, (maps.shape[-2], maps.shape[-1]))
    return mean_distance(maps)[:, i, j].argsort(stable=True).tolist()


def draw_rows(
        rows: Sequence[torch.Tensor],
        orders: Sequence[Sequence[int]],
        mark: Optional[Tuple[int, int]],
        title: str,
        small: str,
        picture: Optional[torch.Tensor],
        net: str,
        over: bool = False,
) -> Figure:
    """Images of heads, shape (heads, h, w) per layer, a row per layer, all on one scale; above each its largest value.

    ``orders`` says in which order heads are drawn, ``mark`` which row and column to frame. The picture, shape
    (height, width, 3), stands above the maps, or under each of them as well (``over``).
    """
    most = max(float(row.nan_to_num(0.).max()) for row in rows) or 1.
    norm = PowerNorm(0.5, 0., most)  # the root shows small shares too
    columns = max(len(row) for row in rows)
    height, width = rows[0].shape[-2:]
    left, right, bar = 0.34, 0.04, 0.42
    cell = min((TEXT_WIDTH - left - right) / columns, 0.75)
    gap, label = 0.05 * cell, 0.11
    panel = cell - gap
    left += (TEXT_WIDTH - left - right - columns * cell) / 2
    panel_height = panel * height / width
    shown = 0. if picture is None else 1.0
    total = TITLE_HEIGHT + shown + len(rows) * (panel_height + label + gap) + bar
    figure = titled_figure(total, title, f'{small}{SCALE}', net)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)

    def add_image(x: float, y: float, w: float, h: float, image: torch.Tensor, **kwargs):
        """Inches from the left and the top."""
        ax = figure.add_axes((x / TEXT_WIDTH, 1 - (y + h) / total, w / TEXT_WIDTH, h / total))
        if over and picture is not None and image is not picture:
            ax.imshow(picture.mean(-1), 'gray', vmin=0., vmax=1.3, extent=extent, interpolation='nearest')
            kwargs['alpha'] = 0.9 * norm(image.numpy()).data  # where a head doesn't look one sees the picture
        ax.imshow(image.numpy(), extent=extent, interpolation='nearest', aspect='auto', **kwargs)
        frameless(ax)
        if mark is not None:
            ax.add_patch(Rectangle(
                (mark[1] - 0.5, mark[0] - 0.5), 1, 1, fill=False, edgecolor='black', linewidth=0.6,
                path_effects=HALO))
        return ax

    top = TITLE_HEIGHT
    if picture is not None:
        side = shown - 0.08
        add_image((TEXT_WIDTH - side * width / height) / 2, top, side * width / height, side, picture)
        top += shown
    for number, (row, order) in enumerate(zip(rows, orders)):
        top += label
        figure.text(
            (left - 0.24) / TEXT_WIDTH, 1 - (top + panel_height / 2) / total, f'layer {number}', rotation=90,
            ha='center', va='center')
        for column, head in enumerate(order):
            largest = float(row[head].nan_to_num(0.).max())
            ax = add_image(
                left + column * cell, top, panel, panel_height, row[head], cmap=MAP_COLORS, norm=norm)
            ax.set_facecolor('0.8')
            share = f'{largest:.2f}'.lstrip('0') if largest >= 0.095 else f'{largest:.3f}'.lstrip('0')
            size = 5 if columns <= 12 else 4
            color, marker = head_style(head)
            above = 1 + 0.045 / panel_height
            ax.plot(
                0.03 / panel, above, color=color, marker=marker, markersize=0.6 * size, transform=ax.transAxes,
                clip_on=False)
            text = dict(transform=ax.transAxes, fontsize=size, va='center')
            ax.text(0.08 / panel, above, f'{head}', weight='bold', **text)
            ax.text(1, above, share, ha='right', color='0.25', **text)
        top += panel_height + gap
    bar_axes = figure.add_axes((0.3, 0.27 / total, 0.4, 0.06 / total))
    figure.colorbar(ScalarMappable(norm, MAP_COLORS), cax=bar_axes, orientation='horizontal')
    ticks = [part * most for part in (0., 1 / 16, 1 / 4, 9 / 16, 1.)]
    bar_axes.set_xticks(ticks, [f'{tick:.2g}' for tick in ticks])
    bar_axes.set_xlabel('attention, one scale for all panels', fontsize=6, labelpad=1)
    bar_axes.minorticks_off()
    bar_axes.tick_params(length=0, pad=1)
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
    """What one query looks at, a layer per row, a head per column; the query is framed (paper, Fig. 5 to 10).

    Args:
        maps: Attention maps of each layer, shape (heads, H, W, H, W): of one image, or a mean over images.
        query: Row and column of the query, in pixels of the layers' grid; the middle by default.
        window: Side of a square around the query to zoom in on, odd (the paper's is 7). The most local head is on the
            left then; else they are in order. Grey is outside the grid.
        small: More of the small print, such as what the maps are a mean over.
        picture: What the net looked at, shape (height, width, 3), values from 0 to 1.
        over: Lay the maps over the picture, grey, as the papers do, in the place of bare maps.
        net: Which net it is, for the title.

    Raises:
        ValueError: If the query is not on the grid, or the window's side not odd.
    """
    i, j = check_query(query, (maps[0].shape[-2], maps[0].shape[-1]))
    rows = [query_attention(layer, (i, j), window) for layer in maps]
    orders = [list(range(len(layer))) if window is None else by_locality(layer, (i, j)) for layer in maps]
    mark = (i, j) if window is None else (window // 2, window // 2)
    zoom = '' if window is None else f'{window} x {window} pixels around it, the most local head first; '
    title = f'Attention of the query in row {i}, column {j}'
    return draw_rows(rows, orders, mark, title, zoom + small, picture, net, over)


@styled
def figure_average(
        maps: Sequence[torch.Tensor],
        small: str = '',
        picture: Optional[torch.Tensor] = None,
        net: str = '',
) -> Figure:
    """What each pixel receives from all queries on average: see :func:`average_attention` (report, Fig. 8, 20 to 23).

    Args:
        maps: Attention maps of each layer, shape (heads, H, W, H, W): of one image, or a mean over images.
        small: More of the small print.
        picture: What the net looked at, shape (height, width, 3), values from 0 to 1.
        net: Which net it is, for the title.
    """
    rows = [average_attention(layer) for layer in maps]
    orders = [list(range(len(layer))) for layer in maps]
    title = 'Attention that each pixel receives, mean over all queries'
    return draw_rows(rows, orders, None, title, small, picture, net)
