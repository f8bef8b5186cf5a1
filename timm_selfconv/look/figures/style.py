"""How all figures look, and how they are saved."""
import io
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from tqdm import tqdm

from timm_selfconv.files import new_folder, write_new

__all__ = [
    'FORMATS', 'MAP_COLORS', 'TEXT_WIDTH', 'TITLE_HEIGHT', 'frameless', 'head_legend', 'head_style', 'lay_out',
    'save_figure', 'save_figures', 'styled', 'titled_figure',
]

TEXT_WIDTH = 5.5  # inches, a paper's single column of text
MAP_COLORS = 'viridis'  # as the explorer has it: perceptually uniform, the colour-blind can read it
TITLE_HEIGHT = 0.46  # inches

# Paul Tol's muted colours, nine that the colour-blind tell apart; heads beyond get the next marker
HEAD_COLORS = ('#332288', '#88CCEE', '#44AA99', '#117733', '#999933', '#DDCC77', '#CC6677', '#882255', '#AA4499')
HEAD_MARKERS = ('o', '^', 's', 'D', 'v')

STYLE: Any = {
    'font.size': 7, 'axes.titlesize': 7, 'axes.labelsize': 7, 'xtick.labelsize': 6, 'ytick.labelsize': 6,
    'legend.fontsize': 6, 'axes.linewidth': 0.5, 'xtick.major.width': 0.5, 'ytick.major.width': 0.5,
    'xtick.major.size': 2, 'ytick.major.size': 2, 'axes.titlepad': 3, 'axes.labelpad': 2, 'lines.linewidth': 0.9,
    'lines.markersize': 3.5, 'legend.frameon': False, 'savefig.dpi': 180, 'svg.hashsalt': 'timm_selfconv',
}
# what would make two runs' files differ: dates, and in PNG the version of the software
FORMATS: Dict[str, Dict[str, Optional[str]]] = {
    'png': {'Software': None}, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}


def styled(function: Any) -> Any:
    """Decorate a function that draws: type and lines for a figure of TEXT_WIDTH meanwhile."""
    return matplotlib.rc_context(STYLE)(function)


def head_style(head: int) -> Tuple[str, str]:
    """Colour and marker of a head, the same in all figures.

    Raises:
        ValueError: If there are not that many.
    """
    if not 0 <= head < len(HEAD_COLORS) * len(HEAD_MARKERS):
        raise ValueError(f'head={head}: needs a number from 0 to {len(HEAD_COLORS) * len(HEAD_MARKERS) - 1}')
    return HEAD_COLORS[head % len(HEAD_COLORS)], HEAD_MARKERS[head // len(HEAD_COLORS)]


def head_legend(figure: Figure, heads: int) -> None:
    """Which colour and marker is which head, in rows below a figure whose layout leaves room for them."""
    rows = math.ceil(heads / len(HEAD_COLORS))
    columns = math.ceil(heads / rows)
    handles = []
    for entry in range(rows * columns):  # a legend fills column by column, people read row by row
        head = entry % rows * columns + entry // rows
        if head < heads:
            color, marker = head_style(head)
            handles.append(Line2D([], [], linestyle='', color=color, marker=marker, label=f'head {head}'))
    figure.legend(
        handles=handles, loc='outside lower center', ncols=columns, handletextpad=0.2, columnspacing=1.2,
        labelspacing=0.3)


def titled_figure(height: float, title: str, small: str, net: str = '') -> Figure:
    """A figure without axes.

    Args:
        height: In inches, TITLE_HEIGHT included.
        title: In the topmost line.
        small: In small print below it, what one needs to know to read the figure.
        net: Between the two: the net, its weights and accuracy.
    """
    figure = Figure(figsize=(TEXT_WIDTH, height))
    figure.text(0.5, 1 - 0.05 / height, title, ha='center', va='top', fontsize=9, weight='bold')
    figure.text(
        0.5, 1 - 0.2 / height, '\n'.join(filter(None, (net, small))), ha='center', va='top', fontsize=6, color='0.3',
        linespacing=1.35)
    return figure


def lay_out(figure: Figure, top: float = TITLE_HEIGHT) -> None:
    """Let matplotlib place axes and legends below the title, ``top`` inches from the figure's edge."""
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0., 0., 1., 1 - top / figure.get_figheight())))


def frameless(ax: Axes) -> None:
    """An image without ticks in a thin frame."""
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set(linewidth=0.3, color='0.55')


def save_figure(figure: Figure, path: Union[str, Path]) -> None:
    """Save a figure as PNG, SVG or PDF, by the file's ending: the same figure gives the same bytes.

    Args:
        figure: What to save.
        path: Where to; the file must not exist yet, and is written whole or not at all.

    Raises:
        ValueError: If the ending is another.
        FileExistsError: If the file exists; it is left alone.
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
        FileExistsError: If there is something already; it is left alone.
    """
    with new_folder(folder) as temporary:
        for name, figure in tqdm(figures.items(), desc='figures', unit='file', leave=False, disable=None):
            save_figure(figure, temporary / f'{name}.{ending}')
    return [Path(folder, f'{name}.{ending}') for name in figures]
