"""Style of all figures, and how they are saved."""
import io
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from tqdm import tqdm

from timm_selfconv.files import new_folder, write_new

__all__ = [
    'HALO', 'MAP_COLORS', 'TEXT_WIDTH', 'check_ending', 'head_style', 'save_figure', 'save_figures', 'styled',
    'titled_figure',
]

TEXT_WIDTH = 5.5  # inches, a paper's single column of text
SMALL_PRINT = 116  # characters to its line
MAP_COLORS = 'viridis'  # perceptually uniform, safe for colour-blind readers; same as the explorer
HALO = [withStroke(linewidth=1.2, foreground='white')]  # keeps dark marks visible on dark pixels

# Paul Tol's muted colours, darkened to a contrast of at least 3 on the grey of the grids; nine heads have
# the same marker, and styles repeat after 45 heads
HEAD_COLORS = ('#332288', '#0077bb', '#2b8a7b', '#117733', '#7f7f1e', '#a86a00', '#cc4c5c', '#882255', '#aa4499')
HEAD_MARKERS = ('o', '^', 's', 'D', 'v')

STYLE: Any = {
    'font.size': 7, 'axes.titlesize': 7, 'axes.labelsize': 7, 'xtick.labelsize': 6, 'ytick.labelsize': 6,
    'legend.fontsize': 6, 'axes.linewidth': 0.5, 'xtick.major.width': 0.5, 'ytick.major.width': 0.5,
    'xtick.major.size': 2, 'ytick.major.size': 2, 'axes.titlepad': 3, 'axes.labelpad': 2, 'lines.linewidth': 0.9,
    'lines.markersize': 3.5, 'legend.frameon': False, 'savefig.dpi': 180, 'svg.hashsalt': 'timm_selfconv',
}
styled: Any = matplotlib.rc_context(STYLE)  # decorator of functions that draw
# metadata that would differ between runs: dates, and in PNG the version of matplotlib
FORMATS: Dict[str, Dict[str, Optional[str]]] = {
    'png': {'Software': None}, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}


def head_style(head: int) -> Tuple[str, str]:
    """Colour and marker of a head, the same in all figures."""
    return HEAD_COLORS[head % len(HEAD_COLORS)], HEAD_MARKERS[head // len(HEAD_COLORS) % len(HEAD_MARKERS)]


def titled_figure(height: float, title: str, small: str, net: str = '') -> Figure:
    """A figure with a title, the net and small print above the axes, in constrained layout.

    The height in inches does not include the title and the small print, which is wrapped.
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


def check_ending(path: Union[str, Path]) -> str:
    """Return the format of a file of a figure, from its suffix, or raise a ValueError."""
    ending = Path(path).suffix[1:].lower()
    if ending not in FORMATS:
        raise ValueError(f'path={str(path)!r}: needs one of the endings {", ".join("." + f for f in FORMATS)}')
    return ending


def save_figure(figure: Figure, path: Union[str, Path]) -> None:
    """Save a figure as PNG, SVG or PDF, by suffix. Equal figures give equal bytes.

    Args:
        figure: The figure.
        path: New file, written completely or not at all.

    Raises:
        ValueError: If the suffix is another.
        FileExistsError: If the file exists; it is not changed.
    """
    ending = check_ending(path)
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format=ending, metadata=FORMATS[ending])
    write_new(path, content.getvalue())


def save_figures(figures: Mapping[str, Figure], folder: Union[str, Path], ending: str = 'png') -> List[Path]:
    """Save figures in a new folder: all of them, or none.

    Args:
        figures: By name, from :func:`draw_figures`.
        folder: New folder.
        ending: 'png', 'svg' or 'pdf'.

    Returns:
        The files.

    Raises:
        FileExistsError: If the folder exists; it is not changed.
    """
    with new_folder(folder) as temporary:
        for name, figure in tqdm(figures.items(), desc='figures', unit='file', leave=False, disable=None):
            save_figure(figure, temporary / f'{name}.{ending}')
    return [Path(folder, f'{name}.{ending}') for name in figures]
