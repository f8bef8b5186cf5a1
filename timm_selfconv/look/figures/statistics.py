"""Residuals of layers and statistics of heads."""
import textwrap
from typing import Any, Dict, List, Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from timm_selfconv.layers import gaussian_axis_scores
from timm_selfconv.look.heads import LayerReport, report_layer
from timm_selfconv.theory import tap_offsets
from .maps import Grid
from .style import head_style, styled, titled_figure

__all__ = ['baselines', 'convolution_maps', 'figure_heads', 'figure_statistics']

# titles by attribute of HeadReport
PANELS = {
    'distance': 'mean distance [pixels]', 'spread': 'spread [pixels]', 'entropy': 'entropy [nats]',
    'on_tap': 'attention on its nearest tap', 'consistency': 'translation consistency'}
COMPARED = {'distance': 'distance', 'spread': 'spread', 'on_tap': 'on nearest tap'}
LINES: Any = (':', '--', '-')
NUMBERED = 9  # most heads in a layer that are drawn as numbers


def convolution_maps(grid: Grid, kernel_size: int) -> torch.Tensor:
    """Attention maps that equal a convolution (Theorem 1), a head per tap, shape (taps, H, W, H, W).

    A tap beyond the border falls on the nearest pixel, like a sharp Gaussian.
    """
    centers = tap_offsets(kernel_size).float()
    precision = torch.full((len(centers),), 1e4)
    rows, cols = (gaussian_axis_scores(c, precision, n).softmax(-1) for c, n in zip(centers.T, grid))
    return rows[:, :, None, :, None] * cols[:, None, :, None, :]


def baselines(grid: Grid, kernel_size: int, by_position: bool = False) -> Dict[str, List[LayerReport]]:
    """Reports on uniform attention and on an exact convolution, one layer each.

    Args:
        grid: Rows and columns.
        kernel_size: Side of the convolution.
        by_position: For comparison with attention by position only, without consistency.
    """
    uniform = torch.ones(1, *grid, *grid) / (grid[0] * grid[1])
    return {
        name: [report_layer(0, maps[None, None], kernel_size, by_position)]
        for name, maps in (('uniform maps', uniform), ('a convolution', convolution_maps(grid, kernel_size)))}


def draw_residuals(ax: Axes, layers: Sequence[LayerReport]) -> None:
    numbers = [layer.layer for layer in layers]
    ax.plot(
        numbers, [layer.residual for layer in layers], color='black', marker='o',
        label='residual, coefficients free at each query')
    ax.plot(
        numbers, [layer.shared_residual for layer in layers], color='black', marker='s', markerfacecolor='white',
        label='residual, one set of coefficients for all queries')


def head_marks(*nets: Sequence[LayerReport]) -> str:
    return 'number' if max(len(layer.heads) for layers in nets for layer in layers) <= NUMBERED else 'mark'


def draw_heads(ax: Axes, layers: Sequence[LayerReport], statistic: str) -> None:
    """A number per head at its value, a step per layer; markers if there are many heads."""
    numbered = head_marks(layers) == 'number'
    for layer in layers:
        for head in layer.heads:
            color, marker = head_style(head.head)
            shift = 0.7 * ((head.head + 0.5) / len(layer.heads) - 0.5)  # side by side
            ax.plot(
                layer.layer + shift, getattr(head, statistic), color=color, linestyle='', markeredgewidth=0.2,
                marker=f'${head.head}$' if numbered else marker, markersize=3.5 if numbered else 2.)


def finish_axes(figure: Figure) -> None:
    for ax in figure.axes:
        ax.set_ylim(bottom=min(0., ax.get_ylim()[0]))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(color='0.92', linewidth=0.5)
        ax.set_axisbelow(True)


@styled
def figure_heads(nets: Mapping[str, Sequence[LayerReport]], kernel_size: int, small: str = '') -> Figure:
    """Draw statistics of the heads of several nets, with a column per net and a mark per head.

    Args:
        nets: Reports from :func:`timm_selfconv.look.heads.report_heads`, by title of the column.
        kernel_size: K of the reports.
        small: More small print.
    """
    names = [textwrap.wrap(name, 90 // len(nets)) for name in nets]
    lines = max(map(len, names))
    figure = titled_figure(
        0.95 * (len(COMPARED) + 1) + 0.12 * lines, 'How convolutional each head is',
        f"{small}a {head_marks(*nets.values())} is a head; distance and spread in pixels of a layer's grid; "
        f'bold: how many heads are taps of a {kernel_size} x {kernel_size} kernel')
    axes = figure.subplots(len(COMPARED) + 1, len(nets), squeeze=False, sharex='col', sharey='row')
    for column, (name, layers) in enumerate(zip(names, nets.values())):
        for ax, statistic in zip(axes[:, column], COMPARED):
            draw_heads(ax, layers, statistic)
        draw_residuals(axes[-1, column], layers)
        for layer in layers:
            taps = sum(head.acts_as_tap for head in layer.heads)
            if taps:
                axes[2, column].annotate(
                    str(taps), (layer.layer, 1.08), ha='center', color='black', fontsize=6, weight='bold')
        axes[0, column].set_title('\n'.join([''] * (lines - len(name)) + name))
        axes[-1, column].set_xlabel('layer')
    for ax, label in zip(axes[:, 0], [*COMPARED.values(), 'residual']):
        ax.set_ylabel(label)
    for ax in axes[2:].flat:
        ax.set_ylim(-0.04, 1.04)
    axes[2, 0].set_ylim(-0.04, 1.24)
    finish_axes(figure)
    figure.legend(handles=axes[-1, 0].lines[:2], loc='outside lower center', ncols=2)
    return figure


@styled
def figure_statistics(
        layers: Sequence[LayerReport],
        kernel_size: int,
        small: str = '',
        against: Mapping[str, Sequence[LayerReport]] = {},
        net: str = '',
) -> Figure:
    """Draw the residual to K x K convolutions and statistics of heads, with a step per layer and a mark per head.

    Args:
        layers: From :func:`timm_selfconv.look.heads.report_heads`.
        kernel_size: K of the report.
        small: More small print.
        against: Up to three baselines by name, with as many layers, or one for all; means over heads are drawn as grey
            lines. A statistic that one of the nets lacks gets no panel.
        net: Name of the net, for the title.
    """
    panels = [name for name in PANELS if all(
        getattr(reports[0].heads[0], name) is not None for reports in (layers, *against.values()))]
    figure = titled_figure(
        3.8, 'How convolutional each layer is',
        f'{small}a {head_marks(layers)} is a head, over queries whose {kernel_size} x {kernel_size} pixels are on the '
        'grid', net)
    axes = figure.subplots(2, 3, sharex=True)
    numbers = [layer.layer for layer in layers]
    residual_axes, *others = axes.flat
    draw_residuals(residual_axes, layers)
    residual_axes.set(title=f'residual to {kernel_size} x {kernel_size} convolutions', ylim=(-0.04, 1.04))
    for ax, name in zip(others, panels):
        draw_heads(ax, layers, name)
        ax.set_title(PANELS[name])
        if name in ('on_tap', 'consistency'):
            ax.set_ylim(-0.04, 1.04)
    for reports, line in zip(against.values(), LINES):
        style: Any = dict(color='0.6', linestyle=line, linewidth=0.9, zorder=1)
        across = [numbers[0] - 0.4, *numbers[1:-1], numbers[-1] + 0.4]
        spread_out = [reports[min(i, len(reports) - 1)] for i in range(len(across))]
        residual_axes.plot(across, [layer.residual for layer in spread_out], **style)
        for ax, name in zip(others, panels):
            means = [sum(getattr(head, name) for head in layer.heads) / len(layer.heads) for layer in spread_out]
            ax.plot(across, means, **style)
    for ax in others[len(panels):]:
        ax.remove()
    for ax in figure.axes:
        ax.set_xlabel('layer')
        ax.tick_params(labelbottom=True)
    finish_axes(figure)
    handles = [Line2D([], [], color='0.6', linestyle=line, label=name) for name, line in zip(against, LINES)]
    figure.legend(handles=[*residual_axes.lines[:2], *handles], loc='outside lower center', ncols=3)
    return figure
