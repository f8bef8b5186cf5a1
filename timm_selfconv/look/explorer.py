"""The attention explorer: a page without server or network that shows the attention maps of any query.

This module packs the maps into the page:

- Attention by position only has a score for each offset ``(d1, d2)``: ``rows[d1] + cols[d2] + cross d1 d2`` (the last
  term only for full precision matrices). A head takes two tables and one number, in float64.
- All other attention takes a byte for every query and key: the square root of the probability divided by the largest
  of its map, times ``LEVELS``. Weights of vector attention take a signed byte. The page unpacks a picture on demand.

Each layer has its own grid. The attention of the class token is packed as layers with a single query. Each layer also
has the most attended offset of each head and the least attention to it. If the history of the training is available,
the page has the mean and covariance of each head after each epoch.
"""
import base64
import copy
import html
import io
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from timm.data import ImageNetInfo, infer_imagenet_subset

from timm_selfconv.data import label_names, preprocess, rank_classes, to_picture
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.hooks import look_into, private_copy
from timm_selfconv.theory import position_blobs
from timm_selfconv.theory.learned_kernels import most_attended
from timm_selfconv.weights.history import find_history, read_history
from .attention_maps import attention_layers, attention_maps, class_attention, footprint_weights, has_class_token, \
    has_footprints, layer_names, looks_at_content

__all__ = ['explorer_page']

PAGE = Path(__file__).with_name('page')
LEVELS = 127
MAX_ENTRIES = 2 ** 27
LARGEST = 32 ** 2  # pixels; on larger grids, attention by position only is not searched for shifts


def read_part(name: str) -> str:
    texts: Dict[str, str] = {}  # a script comes after the modules that it imports

    def read(name: str) -> None:
        text = (PAGE / name).read_text(encoding='utf-8')
        for module in re.findall(r"^import [^;]* from '\./(.*)';$", text, re.M):
            read(module)
        texts.setdefault(name, text)

    read(name)
    return re.sub(r'^import [^;]*;\n|^export ', '', ''.join(texts.values()), flags=re.M)


def fill_page(name: str, **slots: str) -> str:
    page = re.sub(
        r'\{\{([\w.-]+)\}\}', lambda slot: read_part(slot[1]) if '.' in slot[1] else slots[slot[1]], read_part(name))
    return page.encode(errors='replace').decode()  # file names may have undecodable bytes


def pack(x: torch.Tensor) -> str:
    array = x.detach().cpu().contiguous().numpy()
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder('<')).tobytes())).decode()


def pack_maps(maps: torch.Tensor) -> Dict[str, Any]:
    """Pack maps of a layer, shape (B, heads, queries, H, W), as bytes, a text for each picture."""
    if not maps.isfinite().all():
        raise ValueError('model: its attention maps are not finite (NaN)')
    shape, peaks = maps.shape[-2:], maps.amax((-2, -1), keepdim=True)
    levels = LEVELS * (maps / peaks.clamp(min=torch.finfo(maps.dtype).tiny)).sqrt()
    return dict(heads=maps.shape[1], queries=shape, shape=shape, parts=list(map(pack, levels.round().byte())))


def fixed_offsets(maps: torch.Tensor) -> List[Tuple[int, int, float]]:
    return [(*head.offset, round(head.least, 4)) for head in most_attended(maps)]


def image_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, 'png')
    return 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()


def picture_uri(model: nn.Module, image: torch.Tensor) -> str:
    return image_uri(Image.fromarray((to_picture(model, image) * 255).round().byte().contiguous().numpy()))


def check_entries(entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise ValueError(
            f'images: their attention maps have {entries:,} numbers, but a page holds at most {MAX_ENTRIES:,}; use '
            'fewer or smaller images')


def describe_attention(model: nn.Module, batch: torch.Tensor) -> Dict[str, Any]:
    """Packed attention of each layer, for a batch of images, or for the first if all have the same."""
    content, own = looks_at_content(model), all(isinstance(m, SelfAttention2d) for m in attention_layers(model))

    def tables(layer: SelfAttention2d, x: torch.Tensor, *_: Any) -> Dict[str, Any]:
        grid = x.shape[1:3]
        tables = copy.deepcopy(layer.encoding).cpu().offset_tables(*grid)  # float64, which some devices lack
        shifts = fixed_offsets(layer.attention_probs(x).float()) if grid.numel() <= LARGEST else []
        return dict(heads=layer.num_heads, queries=grid, shape=grid, tables=list(map(pack, tables)), shifts=shifts)

    if own and not content:
        packed = look_into(model, SelfAttention2d, batch[:1], tables)
    else:
        batch = batch if content else batch[:1]
        first = [] if own else attention_maps(model, batch[:1])
        sizes = [m.numel() for m in first] or look_into(
            model, SelfAttention2d, batch[:1], lambda layer, x, *_: layer.num_heads * x.shape[1:3].numel() ** 2)
        check_entries(len(batch) * sum(sizes))  # before maps of all pictures take memory
        maps = first if first and len(batch) == 1 else attention_maps(model, batch)
        packed = [dict(pack_maps(m.flatten(2, 3)), shifts=fixed_offsets(m)) for m in maps]
    names = [name.capitalize() for name in layer_names(model, len(packed))]
    packed = [dict(layer, name=name) for layer, name in zip(packed, names)]
    if has_class_token(model):
        token = class_attention(model, batch)
        if len(token) < len(names):
            names = [f'Class layer {i}' for i in range(len(token))]
        packed += [
            dict(pack_maps(m[:, :, None]), queries=(1, 1), name=f'{name}, class token', token=True)
            for m, name in zip(token, names)]
    return dict(content=content, layers=packed)


def describe_footprints(model: nn.Module, batch: torch.Tensor) -> Dict[str, Any]:
    """Packed weights of each layer of a net of vector attention."""
    layers = footprint_weights(model, batch)
    check_entries(sum(weights.numel() for weights in layers))
    signed = any(bool((weights < 0).any()) for weights in layers)
    packed = []
    for weights, name in zip(layers, layer_names(model, len(layers))):
        shape, step = weights.shape[-2:], float(weights.abs().max()) / 127 or 1.
        packed.append(dict(
            name=name.capitalize(), heads=weights.shape[1], queries=weights.shape[2:4], shape=shape, step=step,
            middle=0. if signed else 1 / shape.numel(),
            parts=list(map(pack, (weights / step).round().char()))))
    return dict(content=True, layers=packed)


def describe_predictions(model: nn.Module, batch: torch.Tensor) -> List[List[Tuple[str, float]]]:
    """The three most probable classes of each picture with their probabilities, without NaN."""
    subset = None if label_names(model) else infer_imagenet_subset(model)
    info = ImageNetInfo(subset) if subset and type(model).__module__.startswith('timm.') else None
    return [
        [(info.index_to_description(int(name)) if info else name, p) for name, p in ranked if math.isfinite(p)][:3]
        for ranked in rank_classes(private_copy(model), batch)]


def describe_film(run: Path, model: nn.Module, passes: int, grid: Tuple[int, int]) -> Optional[Dict[str, Any]]:
    """Centres and covariances of the heads of each pass after each epoch, or None if the history lacks them."""
    history = read_history(run)
    rows = history['rows']
    if any(not row['heads'] for row in rows):
        return None
    heads = [len(layer.centers) for layer in position_blobs(model, grid) or ()]  # a shared layer counts once
    if history['grid'] != list(grid) or any([len(layer) for layer in row['heads']] != heads for row in rows):
        raise ValueError(f'{run}: needs the history of a net with {heads} heads on a grid of {list(grid)}')

    def numbers(name: str) -> List[Optional[float]]:
        return [x if x is not None and math.isfinite(x) else None for x in (row.get(name) for row in rows)]

    return dict(
        heads=pack(torch.tensor([
            passes // len(heads) * [head for layer in row['heads'] for head in layer] for row in rows])),
        epochs=[row['epochs'] for row in rows], loss=numbers('train_loss'), top1=numbers('eval_top1'))


def explorer_page(
        model: nn.Module,
        images: Mapping[str, Image.Image],
        name: str = '',
        caption: str = '',
        run: Optional[Union[str, Path]] = None,
) -> str:
    """The explorer of a net and pictures, as a single page that works offline.

    Args:
        model: Net with a timm configuration that :func:`attention_maps` or :func:`footprint_weights` can read.
        images: Pictures of any size, by name, preprocessed as the net's configuration says. For a full-size net with
            content each picture adds 2 to 3 MB.
        name: Name of the net on the page.
        caption: A line about the net, such as the source of its weights.
        run: Folder of a run, or net with a history that ships, to play the training.

    Returns:
        HTML.

    Raises:
        ValueError: If pictures are missing, the net cannot be read, or the history belongs to another net.
    """
    if not images:
        raise ValueError('images: needs at least one')
    batch = preprocess(model, list(images.values()))
    attention = describe_footprints(model, batch) if has_footprints(model) else describe_attention(model, batch)
    grid = max(layer['queries'] for layer in attention['layers'])
    history = None if run is None else find_history(run)
    pictures = [picture_uri(model, image) for image in batch]
    described = dict(
        name=name, caption=caption, images=list(images), grid=grid, **attention,
        film=history and describe_film(history, model, len(attention['layers']), grid),
        average=picture_uri(model, batch.mean(0)), pictures=pictures, predictions=describe_predictions(model, batch))
    data = json.dumps(described, allow_nan=False).replace('<', '\\u003c')  # inside a script element only "<" can end it
    return fill_page('explorer.html', title=html.escape(name), data=data, picture=pictures[0])
