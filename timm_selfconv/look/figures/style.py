"""Style of all figures, and how they are saved."""
import io
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from tqdm import tqdm

from timm_selfconv.files import new_folder, write_new

__all__ = [
    'FORMATS', 'HALO', 'MAP_COLORS', 'TEXT_WIDTH', 'draw_head', 'head_style', 'save_figure', 'save_figures', 'styled',
    'titled_figure',
]

TEXT_WIDTH = 5.5  # inches, a paper's single column of text
SMALL_PRINT = 116  # characters to its line
MAP_COLORS = 'viridis'  # as the explorer has it: perceptually uniform, the colour-blind can read it
HALO = [withStroke(linewidth=1.2, foreground='white')]  # what is dark shows on bright pixels, its halo on dark ones

# after Paul Tol's muted colours, darkened to a contrast of at least 3 on the grids' grey; heads beyond get the next
# marker, those beyond 45 the first one again, and all have their numbers beside them
HEAD_COLORS = ('#332288', '#0077bb', '#2b8a7b', '#117733', '#7f7f1e', '#a86a00', '#cc4c5c', '#882255', '#aa4499')
HEAD_MARKERS = ('o', '^', 's', 'D', 'v')

STYLE: Any = {
    'font.size': 7, 'axes.titlesize': 7, 'axes.labelsize': 7, 'xtick.labelsize': 6, 'ytick.labelsize': 6,
    'legend.fontsize': 6, 'axes.linewidth': 0.5, 'xtick.major.width': 0.5, 'ytick.major.width': 0.5,
    'xtick.major.size': 2, 'ytick.major.size': 2, 'axes.titlepad': 3, 'axes.labelpad': 2, 'lines.linewidth': 0.9,
    'lines.markersize': 3.5, 'legend.frameon': False, 'savefig.dpi': 180, 'svg.hashsalt': 'timm_selfconv',
}
styled: Any = matplotlib.rc_context(STYLE)  # decorates functions that draw: type and lines for a figure of TEXT_WIDTH
# what would make two runs' files differ: dates, and in PNG the version of the software
FORMATS: Dict[str, Dict[str, Optional[str]]] = {
    'png': {'Software': None}, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}


def head_style(head: int) -> Tuple[str, str]:
    """Colour and marker of a head, the same in all figures."""
    return HEAD_COLORS[head % len(HEAD_COLORS)], HEAD_MARKERS[head // len(HEAD_COLORS) % len(HEAD_MARKERS)]


def draw_head(ax: Axes, x: float, y: float, head: int, size: float = 5, place: int = 0, **kwargs: Any) -> None:
    """Draw a head's dot, and its number in points of type at a place in the row of labels beside the dot."""
    color, marker = head_style(head)
    ax.plot(x, y, color=color, marker=marker, linestyle='', zorder=3, **kwargs)
    ax.annotate(
        str(head), (x, y), (1.5 + 0.8 * size * place, 1), textcoords='offset points', color=color, fontsize=size,
        weight='bold', zorder=4, path_effects=HALO).set_in_layout(False)


def titled_figure(height: float, title: str, small: str, net: str = '') -> Figure:
    """A figure whose axes constrained layout places below the title and, in small print, the net and how to read it.

    Its height is in inches, without the title and the small print, whose lines are broken so that they fit.
    """
    lines = [line for text in (net, small) for line in textwrap.wrap(text, SMALL_PRINT)]
    top = 0.24 + 0.115 * len(lines)
    height += top
    figure = Figure(figsize=(TEXT_WIDTH, height))
    figure.text(0.5, 1 - 0.05 / height, title, ha='center', va='top', fontsize=9, weight='bold')
    figure.text(
        0.5, 1 - 0.2 / height, '\n'.join(lines), ha='center', va='top', fontsize=6, color='0.3', linespacing=1.35)
    figure.set_layout_engine('constrained', rect=(0., 0., 1., 1 - top / height))
    return figure


def save_figure(figure: Figure, path: Union[str, Path]) -> None:
    """Save a figure as PNG, SVG or PDF, by the file's ending: the same figure gives the same bytes.

    Args:
        figure: What to save.
        path: Where to; the file must not exist yet, and is written whole or not at all.

    Raises:
        ValueError: If the ending is another.
        FileExistsError: If the file exists; it stays as it is.
    """
    ending = Path(path).suffix[1:].lower()
    if ending not in FORMATS:
        raise ValueError(f'path={str(path)!r}: needs one of the endings {", ".join("." + f for f in FORMATS)}')
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format=ending, metadata=FORMATS[ending])
    write_new(path, content.getvalue())


def save_figures(figures: Mapping[str, Figure], folder: Union[str, Path], ending: str = 'png') -> List[Path]:
    """Save figures by name in a folder that must not exist yet: all of them appear at once, or none.

    Args:
        figures: By name, as :func:`draw_figures` returns them.
        folder: Where to.
        ending: 'png', 'svg' or 'pdf'.

    Returns:
        The files.

    Raises:
        FileExistsError: If there is something already; it stays as it is.
    """
    with new_folder(folder) as temporary:
        for name, figure in tqdm(figures.items(), desc='figures', unit='file', leave=False, disable=None):
            save_figure(figure, temporary / f'{name}.{ending}')
    return [Path(folder, f'{name}.{ending}') for name in figures]
