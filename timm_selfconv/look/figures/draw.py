"""All figures that apply to a net."""
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from matplotlib.figure import Figure
from tqdm import tqdm

from timm_selfconv.data import to_picture
from timm_selfconv.look.attention_maps import attention_maps, footprint_weights, has_footprints, layer_names, \
    looks_at_content
from timm_selfconv.look.heads import check_input, report_maps
from timm_selfconv.theory import position_blobs
from .centers import figure_centers, figure_regions, figure_training, training_blobs
from .kernels import figure_kernels
from .maps import figure_average, figure_footprints, figure_query

__all__ = ['draw_figures']

BATCH_SIZE = 8
WINDOW = 7  # pixels, the paper's zoom in Fig. 5
REPORTED = 8  # images for the figure of kernels


def mean_over(images: torch.Tensor, look: Callable[[torch.Tensor], List[torch.Tensor]]) -> List[torch.Tensor]:
    total: List[torch.Tensor] = []
    size = max(1, BATCH_SIZE * 64 ** 2 // max(64 ** 2, images[0, 0].numel()))  # large pictures have large maps
    for batch in tqdm(images.split(size), desc='attention', unit='batch', leave=False, disable=None):
        sums = [layer.sum(0).cpu().float() for layer in look(batch)]
        total = [a + b for a, b in zip(total, sums)] if total else sums
    return [layer / len(images) for layer in total]


def over_images(number: int) -> str:
    return f'mean over {number} images; ' if number > 1 else ''


def draw_figures(
        model: nn.Module,
        images: Optional[torch.Tensor] = None,
        names: Sequence[str] = (),
        query: Optional[Tuple[int, int]] = None,
        net: str = '',
        run: Optional[str] = None,
) -> Dict[str, Figure]:
    """Draw all figures that apply to a net.

    Args:
        model: A net of the zoo with attention, or one of timm's vision transformers.
        images: Preprocessed images, shape (B, C, height, width), to average over. Not needed for attention by position
            only.
        names: Names of the first images, which get figures each.
        query: Row and column of the query on the first layer's grid; the middle by default.
        net: Name, weights and accuracy of the net, for the titles.
        run: A run, or a net with a history, see :func:`training_blobs`.

    Returns:
        Figures by name: 'centers', 'attention', 'attention-7x7', 'average' and 'kernels'; for each named
        image 'attention-NAME', 'overlay-NAME' and 'average-NAME'; with a run 'training'; for vector attention
        'footprints' only.

    Raises:
        ValueError: If the attention cannot be read, images are missing, the query is not on the grid, two images have
            one name, the run belongs to another net, or an argument does not apply to the net.
    """
    if len({*names, f'{WINDOW}x{WINDOW}'}) <= len(names):
        raise ValueError(f'names={list(names)}: needs a different name for each image, and not {WINDOW}x{WINDOW}')
    vector = has_footprints(model)
    given = [argument for argument, value in dict(query=query, run=run).items() if value]
    if vector and given:
        raise ValueError(f'{", ".join(given)}: vector attention has only footprints')
    content = vector or looks_at_content(model)
    images = check_input(model, images, content)
    if vector:
        weights = mean_over(images, lambda batch: [w.mean((2, 3)) for w in footprint_weights(model, batch)])
        return dict(footprints=figure_footprints(
            weights, layer_names(model, len(weights)), over_images(len(images)), net))

    history = None if run is None else training_blobs(model, run)
    seen = images if content else images[:1]  # all images have the same map
    maps = mean_over(seen, lambda batch: attention_maps(model, batch))
    grids = [(m.shape[-2], m.shape[-1]) for m in maps]
    note = over_images(len(seen))
    blobs, reported, side = position_blobs(model), seen[:REPORTED], min(3, *map(min, grids))  # of kernels
    figures = {
        'centers': figure_regions(maps, query, note, net) if blobs is None else figure_centers(blobs, grids, net),
        'attention': figure_query(maps, query, small=note, net=net),
        f'attention-{WINDOW}x{WINDOW}': figure_query(maps, query, WINDOW, note, net=net),
        'average': figure_average(maps, note, net=net),
        'kernels': figure_kernels(report_maps(model, reported, side), over_images(len(reported)), net),
    }
    for name, image in tqdm(list(zip(names, images)), desc='pictures', leave=False, disable=None):
        single = [m[0].cpu() for m in attention_maps(model, image[None])]
        picture = to_picture(model, image)
        figures[f'attention-{name}'] = figure_query(single, query, picture=picture, net=net)
        figures[f'overlay-{name}'] = figure_query(single, query, picture=picture, over=True, net=net)
        figures[f'average-{name}'] = figure_average(single, picture=picture, net=net)
    if history is not None:
        title = net if net.startswith(f'{run}:') else f'{net}; training of {run}'
        figures['training'] = figure_training(*history, title)
    return figures
