"""Figures of the sparse convolution that each layer learned, and of nets with heads as shifts."""
import math
from typing import Any, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from matplotlib.ticker import MaxNLocator

from timm_selfconv.look.heads import LayerReport
from .centers import layer_panels
from .style import HALO, head_style, styled

__all__ = ['figure_kernels', 'figure_shifts']

KEY = (
    'filled square: a head of a fixed offset, its area the mean attention to that pixel, numbers: its heads; '
    'dashed circle: another head, around the centre of its attention, its radius the spread; '
    'cross: the query, in a 3 x 3 kernel')
SHIFTS = {
    'shifts': 'most fixed heads, most attended offset', 'mean': 'the same, rounded mean offset',
    'random': 'random heads, two seeds'}


def draw_kernel(ax: Axes, layer: LayerReport, reach: int) -> None:
    """Draw the taps and the wide heads of a layer up to ``reach`` pixels from the query."""
    edge, lines = reach + 0.5, [x + 0.5 for x in range(-reach - 1, reach + 1)]
    for draw in (ax.hlines, ax.vlines):
        draw(lines, -edge, edge, color='0.9', linewidth=0.3, zorder=-2)
    ax.add_patch(Rectangle((-1.5, -1.5), 3, 3, fill=False, linewidth=0.6, zorder=2))
    ax.plot(0, 0, marker='+', color='black', markersize=4, markeredgewidth=0.6, zorder=3)
    kernel = layer.kernel
    for head in layer.heads:
        if head.head not in kernel.fixed:
            color, _ = head_style(head.head)
            ax.add_patch(Circle(head.center[::-1], head.spread, fill=False, color=color, linestyle='--', linewidth=0.5))
    for row, col in kernel.taps:
        heads = [number for number in kernel.fixed if kernel.heads[number].offset == (row, col)]
        for number in heads:
            side = math.sqrt(kernel.heads[number].mean)
            ax.add_patch(Rectangle(
                (col - side / 2, row - side / 2), side, side, facecolor=head_style(number)[0], linewidth=0, alpha=0.85))
        ax.text(
            col, row, ','.join(map(str, heads)), ha='center', va='center', fontsize=4, color=head_style(heads[0])[0],
            weight='bold', path_effects=HALO, zorder=4).set_in_layout(False)
    ax.set(xlim=(-edge, edge), ylim=(edge, -edge), aspect='equal')
    ax.set_title(f'layer {layer.layer}: {len(kernel.fixed)} of {len(layer.heads)} heads, '
                 f'{len(kernel.taps)} offset{"" if len(kernel.taps) == 1 else "s"}')
    ax.tick_params(length=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


@styled
def figure_kernels(layers: Sequence[LayerReport], small: str = '', net: str = '') -> Figure:
    """Draw the taps of each layer in a panel, offsets in pixels.

    Args:
        layers: Reports from :func:`timm_selfconv.look.heads.report_heads`.
        small: Small print under the title, before the key.
        net: Name of the net, for the title.
    """
    wide = [head.center for layer in layers for head in layer.heads if head.head not in layer.kernel.fixed]
    offsets = [offset for layer in layers for offset in layer.kernel.taps] + wide
    reach = max(2, math.ceil(max(abs(x) for offset in offsets for x in offset)) + 1)
    figure, axes = layer_panels(len(layers), 'Convolutions that the heads learned', f'{small}{KEY}', net)
    for ax, layer in zip(axes, layers):
        draw_kernel(ax, layer, reach)
    return figure


@styled
def figure_shifts(points: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw accuracy over the number of heads that became shifts, a panel for each net.

    Args:
        points: For each net rows of :func:`timm_selfconv.look.findings.shift_points`.
    """
    figure, axes = layer_panels(len(points), 'Heads replaced by pixel shifts, without training', '', '')
    for ax, (net, rows) in zip(axes, points.items()):
        lines = []
        for number, kind in enumerate(SHIFTS):
            own, color = [row for row in rows if row[kind]], head_style(3 * number)[0]
            lines += ax.plot([row['heads'] for row in own], [row[kind] for row in own], '.-', color=color)[:1]
        ax.set(title=net, xlabel='heads that are shifts', ylabel='accuracy')
        ax.label_outer()
    figure.legend(lines, SHIFTS.values(), loc='outside lower center', ncols=3)
    return figure
