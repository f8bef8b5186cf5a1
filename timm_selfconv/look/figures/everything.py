"""All the figures that apply to a net."""
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from matplotlib.figure import Figure
from timm.models._input import get_model_input_config

from timm_selfconv.look.attention_maps import attention_maps, footprint_weights, looks_at_content
from timm_selfconv.data import to_picture
from timm_selfconv.look.heads import report_layer
from timm_selfconv.layers import SanAttention2d
from .centers import encoding_blobs, figure_centers, map_blobs
from .footprints import figure_footprints
from .maps import check_query, figure_average, figure_query
from .statistics import figure_statistics

__all__ = ['draw_figures', 'mean_maps']

BATCH_SIZE = 8
WINDOW = 7  # pixels, the paper's zoom in Fig. 5
KERNEL_SIZE = 3
REPORTED = 8  # images that statistics are taken of: a residual's shared span grows with them


def mean_over(images: torch.Tensor, look: Callable[[torch.Tensor], List[torch.Tensor]]) -> List[torch.Tensor]:
    """Mean over images of what a look at a batch gives, one tensor a layer with the batch first, a few at a time."""
    total: List[torch.Tensor] = []
    for batch in images.split(BATCH_SIZE):
        sums = [layer.sum(0) for layer in look(batch)]
        total = [a + b for a, b in zip(total, sums)] if total else sums
    return [layer / len(images) for layer in total]


def mean_maps(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Attention maps of each layer, mean over images: shape (heads, H, W, H, W) each."""
    return mean_over(images, lambda batch: attention_maps(model, batch))


def mean_footprints(model: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    """Footprint weights of each bottleneck, mean over queries and images: shape (maps, K, K) each."""
    return mean_over(images, lambda batch: [weights.mean((2, 3)) for weights in footprint_weights(model, batch)])


def over_images(number: int) -> str:
    return f'mean over {number} images; ' if number > 1 else ''


def draw_figures(
        model: nn.Module,
        images: Optional[torch.Tensor] = None,
        names: Sequence[str] = (),
        query: Optional[Tuple[int, int]] = None,
) -> Dict[str, Figure]:
    """Draw what applies to a net.

    Args:
        model: A net of the zoo with attention, or one of timm's vision transformers.
        images: Images as the net takes them, shape (B, C, height, width), for means over them. A net that attends by
            position alone needs none.
        names: Names of the first images, which get figures of their own.
        query: Row and column of the query, in pixels of the layers' grid; the middle by default.

    Returns:
        Figures by name: 'centers', 'attention', 'attention-7x7', 'average' and 'statistics'; for every named image,
        'attention-NAME' and 'average-NAME'; of vector attention 'footprints' alone.

    Raises:
        ValueError: If the net has no attention that can be read, looks at content and there are no images, the query is
            not on the grid, or two images have one name.
    """
    if len({*names, f'{WINDOW}x{WINDOW}'}) <= len(names):
        raise ValueError(f'names={list(names)}: needs a name of its own for each image, none of them {WINDOW}x{WINDOW}')
    vector = any(isinstance(m, SanAttention2d) for m in model.modules())
    content = vector or looks_at_content(model)
    if images is None:
        if content:
            raise ValueError('images: this net looks at content, so its attention depends on the pictures; name some')
        images = torch.zeros(1, *get_model_input_config(model)['input_size'])
    if vector:
        return dict(footprints=figure_footprints(mean_footprints(model, images), over_images(len(images))))

    seen = images if content else images[:1]  # one map serves all images
    maps = mean_maps(model, seen)
    query = check_query(query, (maps[0].shape[-2], maps[0].shape[-1]))
    note = over_images(len(seen))
    blobs = encoding_blobs(model)
    if blobs is not None:
        centers = figure_centers(blobs)
    else:
        title = f'Mean and covariance of the attention from row {query[0]}, column {query[1]}, as Gaussians'
        centers = figure_centers(map_blobs(maps, query), title, note)
    reported = attention_maps(model, seen[:REPORTED])
    reports = [report_layer(i, layer, KERNEL_SIZE) for i, layer in enumerate(reported)]
    figures = {
        'centers': centers,
        'attention': figure_query(maps, query, small=note),
        f'attention-{WINDOW}x{WINDOW}': figure_query(maps, query, WINDOW, note),
        'average': figure_average(maps, note),
        'statistics': figure_statistics(reports, KERNEL_SIZE, over_images(len(reported[0]))),
    }
    for name, image in zip(names, images):
        single = [m[0] for m in attention_maps(model, image[None])]
        picture = to_picture(model, image)
        figures[f'attention-{name}'] = figure_query(single, query, picture=picture)
        figures[f'average-{name}'] = figure_average(single, picture=picture)
    return figures
