"""Centres of attention, with the contours that hold half and 90 % of it (paper, Fig. 3, 4, 12, 14; report, Fig. 2).

The shares are those of a Gaussian on an unbounded plane of points: pixels are coarser, and near a border softmax gives
the pixels that are left what the others would get.
"""
import argparse
import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from timm.models import clean_state_dict

from timm_selfconv.layers import QuadraticEncoding, SelfAttention2d, axis_offsets, precision_matrices
from timm_selfconv.theory import center_of_mass
from .maps import check_query
from .style import TEXT_WIDTH, TITLE_HEIGHT, head_legend, head_style, lay_out, styled, titled_figure

__all__ = [
    'Blobs', 'encoding_blobs', 'figure_centers', 'figure_training', 'map_blobs', 'mass_ellipse', 'mass_radius',
    'training_blobs',
]

KEY = 'solid: 50 % of the attention, dotted: 90 %; cross: the query'
CONTOURS: Any = ((0.5, '-'), (0.9, ':'))  # share of the attention, style of its line
FLATTEST = 1e-8  # precision, in 1 / pixels^2, below which a head has none


@dataclass(frozen=True)
class Blobs:
    """A Gaussian a head, in pixels of the layer's grid, relative to the query.

    Attributes:
        centers: Means, (row, column), shape (heads, 2).
        covariances: Shape (heads, 2, 2).
    """
    centers: torch.Tensor
    covariances: torch.Tensor


def mass_radius(mass: float) -> float:
    """Radius, in standard deviations, of the disc that holds a share of a 2-D Gaussian: 1 - exp(-r^2 / 2) = mass.

    Raises:
        ValueError: If the share is not between 0 and 1.
    """
    if not 0 < mass < 1:
        raise ValueError(f'mass={mass!r}: needs a number between 0 and 1')
    return math.sqrt(-2 * math.log1p(-mass))


def mass_ellipse(covariance: torch.Tensor, mass: float) -> Tuple[float, float, float]:
    """The ellipse around a 2-D Gaussian's centre that holds a share of it and is the same density all along.

    Args:
        covariance: In pixels^2, rows before columns, shape (2, 2).
        mass: The share.

    Returns:
        Long and short half-axis in pixels, and the long one's angle in radians from the column axis to the row axis.
    """
    variances, axes = torch.linalg.eigh(covariance.double())
    short, long = (mass_radius(mass) * variances.clamp(min=0.).sqrt()).tolist()
    return long, short, math.atan2(axes[0, 1], axes[1, 1])


def encoding_blobs(model: nn.Module) -> Optional[List[Blobs]]:
    """The Gaussians that quadratic encodings are (equation 9), one entry a layer.

    Returns:
        None for other nets, and where content has a say. A precision below 1e-8 counts as 1e-8, a standard deviation of
        10,000 pixels.
    """
    layers = [m for m in model.modules() if isinstance(m, SelfAttention2d)]
    blobs = []
    for layer in layers:
        encoding = getattr(layer, 'encoding', None)
        if not isinstance(encoding, QuadraticEncoding) or layer.has_query or layer.has_key:
            return None
        precisions, axes = torch.linalg.eigh(precision_matrices(encoding.spreads.detach()).double())
        covariances = axes @ torch.diag_embed(1 / precisions.clamp(min=FLATTEST)) @ axes.mT
        blobs.append(Blobs(encoding.centers.detach().double(), covariances))
    return blobs or None


def map_blobs(maps: Sequence[torch.Tensor], query: Optional[Tuple[int, int]] = None) -> List[Blobs]:
    """Gaussians of the mean and covariance that the attention of one query has, for nets that aren't Gaussian.

    Args:
        maps: Attention maps of each layer, shape (heads, H, W, H, W).
        query: Row and column of the query; the middle by default.

    Returns:
        One entry a layer.

    Raises:
        ValueError: If the query is not on the grid.
    """
    blobs = []
    for layer in maps:
        height, width = layer.shape[-2:]
        i, j = check_query(query, (height, width))
        attention = layer[:, i, j].double()
        centers = center_of_mass(layer.double())[:, i, j]
        rows = axis_offsets(height, attention)[i] - centers[:, :1]
        cols = axis_offsets(width, attention)[j] - centers[:, 1:]
        offsets = torch.stack(torch.broadcast_tensors(rows[:, :, None], cols[:, None, :]), dim=-1)
        blobs.append(Blobs(centers, torch.einsum('hkl,hkla,hklb->hab', attention, offsets, offsets)))
    return blobs


def training_blobs(model: nn.Module, run: Path, columns: int = 6) -> Dict[int, List[Blobs]]:
    """The Gaussians of a net at the checkpoints of its training.

    Args:
        model: A net with quadratic encodings, as it was trained; it stays as it is.
        run: Folder with the ``checkpoint-*.pth.tar`` files of timm's train script.
        columns: How many checkpoints at most, the first and the last one among them.

    Returns:
        One entry a checkpoint: epochs trained, in order, and a Gaussian a head for each layer.

    Raises:
        ValueError: If there are no checkpoints, they are another net's, or its heads aren't Gaussian.
    """
    if encoding_blobs(model) is None:
        raise ValueError(f'model={type(model).__name__}: its centres are no parameters, so training cannot be drawn')
    with torch.serialization.safe_globals([argparse.Namespace]):  # train.py keeps its arguments
        checkpoints = [
            torch.load(path, map_location='cpu', weights_only=True) for path in run.glob('checkpoint-*.pth.tar')]
    if not checkpoints:
        raise ValueError(f'run={str(run)!r}: needs a folder with checkpoint-*.pth.tar files')
    checkpoints.sort(key=lambda checkpoint: checkpoint['epoch'])
    last = len(checkpoints) - 1
    steps = min(columns, len(checkpoints)) - 1
    model = copy.deepcopy(model)
    history = {}
    for checkpoint in [checkpoints[round(i * last / steps) if steps else last] for i in range(steps + 1)]:
        try:
            model.load_state_dict(clean_state_dict(checkpoint['state_dict']))
        except RuntimeError as e:
            raise ValueError(f'run={str(run)!r}: is of another net than {type(model).__name__} as given ({e})') from e
        blobs = encoding_blobs(model)
        assert blobs is not None
        history[checkpoint['epoch'] + 1] = blobs
    return history


def reach(blobs: Sequence[Blobs]) -> int:
    """Half the side of axes that show every centre, and around it the contour of half the mass up to 6 pixels."""
    largest = max(
        float(b.centers.abs().amax(1)[h]) + min(mass_ellipse(b.covariances[h], 0.5)[0], 6.)
        for b in blobs for h in range(len(b.centers)))
    return max(3, math.ceil(largest))


def draw_blobs(ax: Axes, blobs: Blobs, limit: int) -> None:
    """One layer: a dot a head, contours of 50 % (solid) and 90 % (dotted), the query as a cross in the middle."""
    ax.plot(0, 0, marker='+', color='black', markersize=6, markeredgewidth=0.8, linestyle='', zorder=4)
    for head, (center, covariance) in enumerate(zip(blobs.centers, blobs.covariances)):
        color, marker = head_style(head)
        row, col = center.tolist()
        for mass, line in CONTOURS:
            long, short, angle = mass_ellipse(covariance, mass)
            ax.add_patch(Ellipse(
                (col, row), 2 * long, 2 * short, angle=math.degrees(angle), fill=False, edgecolor=color,
                linestyle=line, linewidth=0.7))
        ax.plot(col, row, marker=marker, color=color, linestyle='', markersize=3, zorder=3)
    ax.set(xlim=(-limit - 0.5, limit + 0.5), ylim=(limit + 0.5, -limit - 0.5), aspect='equal')
    step = max(1, limit // 3)
    ticks = [t for t in range(-limit, limit + 1) if t % step == 0]
    ax.set(xticks=ticks, yticks=ticks)


@styled
def figure_centers(layers: Sequence[Blobs], title: str = 'Where the heads look', small: str = '') -> Figure:
    """Where every head of every layer looks, relative to the query (paper, Fig. 4, 12, 14).

    Args:
        layers: One entry a layer, from :func:`encoding_blobs` or :func:`map_blobs`.
        title: Above the figure.
        small: More of the small print, such as what the Gaussians are a mean over.

    Returns:
        Panels of equal scale in pixels, rows downwards, a layer each.
    """
    columns = min(3, len(layers))
    rows = math.ceil(len(layers) / columns)
    side = TEXT_WIDTH / 3
    figure = titled_figure(rows * side * 0.97 + 0.4 + TITLE_HEIGHT, title, small + KEY)
    lay_out(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    limit = reach(layers)
    for number, ax in enumerate(axes.flat):
        if number >= len(layers):
            ax.remove()
            continue
        draw_blobs(ax, layers[number], limit)
        ax.set_title(f'layer {number}')
        ax.set(xlabel='column offset [pixels]', ylabel='row offset [pixels]')
        ax.label_outer()
    head_legend(figure, max(len(b.centers) for b in layers))
    return figure


@styled
def figure_training(history: Dict[int, List[Blobs]]) -> Figure:
    """Centres of attention over training, a layer a row, an epoch a column (paper, Fig. 3; report, Fig. 2).

    Args:
        history: From :func:`training_blobs`.
    """
    layers = len(next(iter(history.values())))
    side = min(TEXT_WIDTH / len(history), TEXT_WIDTH / 4)
    figure = titled_figure(
        0.85 * layers * side + 0.4 + TITLE_HEIGHT, 'Where the heads look, over training',
        f'row and column offsets in pixels; {KEY}')
    lay_out(figure)
    axes = figure.subplots(layers, len(history), squeeze=False, sharex=True, sharey=True)
    limit = reach([b for blobs in history.values() for b in blobs])
    for column, (epochs, blobs) in enumerate(history.items()):
        for row, layer in enumerate(blobs):
            draw_blobs(axes[row, column], layer, limit)
        axes[0, column].set_title(f'after {epochs} epoch{"s" if epochs > 1 else ""}')
    for row in range(layers):
        axes[row, 0].set_ylabel(f'layer {row}')
    head_legend(figure, max(len(b.centers) for blobs in history.values() for b in blobs))
    return figure
