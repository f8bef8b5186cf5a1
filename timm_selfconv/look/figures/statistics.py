"""How convolutional the layers are and what their heads do: a figure that neither paper has."""
from typing import Callable, List, Sequence, Tuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timm_selfconv.look.heads import HeadReport, LayerReport
from .style import head_legend, head_style, lay_out, styled, titled_figure

__all__ = ['figure_statistics']

PANELS: List[Tuple[str, Callable[[HeadReport], float]]] = [
    ('mean distance [pixels]', lambda head: head.distance),
    ('spread [pixels]', lambda head: head.spread),
    ('entropy [nats]', lambda head: head.entropy),
    ('attention on its nearest tap', lambda head: head.on_tap),
    ('translation consistency', lambda head: head.consistency),
]
SHARES = ('attention on its nearest tap', 'translation consistency')


@styled
def figure_statistics(layers: Sequence[LayerReport], kernel_size: int, small: str = '') -> Figure:
    """Residual to all K x K convolutions and statistics of the heads, a layer a step, a head a dot.

    Args:
        layers: What :func:`timm_selfconv.look.heads.report_heads` returns.
        kernel_size: K that it was asked for.
        small: More of the small print, such as what the numbers are means over.
    """
    figure = titled_figure(
        3.9, 'How convolutional each layer is',
        f'{small}a dot is a head, over queries whose {kernel_size} x {kernel_size} pixels are on the grid')
    lay_out(figure)
    axes = figure.subplots(2, 3, sharex=True)
    numbers = [layer.layer for layer in layers]
    ax = axes.flat[0]
    ax.plot(numbers, [layer.residual for layer in layers], color='black', marker='o', label='a query alone')
    ax.plot(
        numbers, [layer.shared_residual for layer in layers], color='0.55', marker='s', linestyle='--',
        label='one set of values')
    ax.set(title=f'residual to {kernel_size} x {kernel_size} convolutions', ylim=(-0.04, 1.04))
    ax.legend(loc='best')
    for ax, (name, statistic) in zip(axes.flat[1:], PANELS):
        for layer in layers:
            heads = len(layer.heads)
            for head in layer.heads:
                color, marker = head_style(head.head)
                shift = 0.5 * ((head.head + 0.5) / heads - 0.5)  # side by side, so that none hides another
                ax.plot(layer.layer + shift, statistic(head), color=color, marker=marker, linestyle='', markersize=2.5)
        ax.set_title(name)
        if name in SHARES:
            ax.set_ylim(-0.04, 1.04)
        else:
            ax.set_ylim(0., 1.06 * max(statistic(head) for layer in layers for head in layer.heads))
    for ax in axes[1]:
        ax.set_xlabel('layer')
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes.flat:
        ax.grid(color='0.92', linewidth=0.5)
        ax.set_axisbelow(True)
    head_legend(figure, max(len(layer.heads) for layer in layers))
    return figure
