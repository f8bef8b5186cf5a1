"""The attention explorer: one page, with no server and no network, that shows where every query of a net looks.

The page draws any query's maps of all heads from what this module packs into it:

- Attention that knows positions alone scores by offset. The score of offset ``(d1, d2)`` is ``rows[d1] + cols[d2] +
  cross d1 d2`` (the last only for a full precision), so a head takes two tables and one number, at float32.
- Attention that looks at content takes a byte for every query and key. Where a net has terms of both kinds, one byte
  serves two maps, that of all terms, P, and that of the content terms alone, C: it holds the larger of ``P / max P``
  and ``C / max C``. Their ratio is the exponential of what the other terms score, rows plus columns, which are carried
  too, and which make the third map. Every map is right to one step, ``1 / levels`` of its largest probability.
"""
import base64
import copy
import html
import io
import json
import re
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from PIL import Image
from tqdm import tqdm

from timm_selfconv.data import class_names, preprocess, to_picture
from timm_selfconv.layers import SelfAttention2d
from .attention_maps import attention_layers, attention_maps, footprint_weights, has_footprints, layer_names, \
    look_into, looks_at_content, private_copy

__all__ = ['explorer_page']

PAGE = Path(__file__).with_name('page')  # explorer.html has slots for the other files, and for what is shown
SCRIPTS = ('maps.js', 'drawing.js', 'panel.js', 'state.js')
LEVELS = (255, 127, 63, 47, 31, 23, 15)
ENTRIES = 4 * 54 * 256 ** 2  # of four CIFAR images' maps in six layers of nine heads, which take a page of 12 MB
BYTES_AN_ENTRY = 0.61
MAX_ENTRIES = 2 ** 27


def read(name: str) -> str:
    """A file of the page."""
    return (PAGE / name).read_text(encoding='utf-8')


def fill_page(name: str, **slots: str) -> str:
    """A page with its slots, {{such}}, filled."""
    return re.sub(r'\{\{(\w+)\}\}', lambda slot: slots[slot[1]], read(name))


def pack(x: torch.Tensor) -> str:
    """A tensor's bytes, little endian, as zlib stream in base64: what the browser's DecompressionStream reads."""
    array = x.detach().cpu().contiguous().numpy()
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder('<')).tobytes())).decode()


def two_map_scores(
        layer: SelfAttention2d,
        x: torch.Tensor,
        key: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """A layer's scores of the terms that look at keys, and of those that know offsets: (B, heads, H W, H W), float64.

    The former are content and key bias, the latter content-position and position; x has shape (B, H, W, dim), and keys
    are those to meet in the place of its own. All on the CPU: some devices lack float64.
    """
    layer = copy.deepcopy(layer).cpu().double()
    x, key = x.cpu().double(), None if key is None else key.cpu().double()
    _, _, bias = layer.query_key_bias(x, key)
    assert bias is not None
    return layer.scores(x, key) - bias, bias.expand(x.shape[0], -1, -1, -1)


def quantise(x: torch.Tensor, step: float, dtype: torch.dtype) -> torch.Tensor:
    """Whole multiples of a step, rounded, those out of the integer type's range held to it."""
    limits = torch.iinfo(dtype)
    return (x / step).round().clamp(limits.min, limits.max).to(dtype)


def split_axes(bias: torch.Tensor, grid: Tuple[int, int]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row scores, column scores and the coefficient of ``d1 d2`` whose sum each query's scores are.

    Of scores of terms that know offsets, shape (..., H W, H W): shapes (..., H W, H), (..., H W, W) and (..., H W).
    """
    height, width = grid
    bias = bias.unflatten(-1, grid)
    cross = bias.new_zeros(bias.shape[:-2])
    if height > 1 and width > 1:
        cross = bias[..., 1, 1] - bias[..., 1, 0] - bias[..., 0, 1] + bias[..., 0, 0]
    query = torch.arange(height * width, device=bias.device)
    d1 = torch.arange(height, device=bias.device) - query[:, None] // width
    d2 = torch.arange(width, device=bias.device) - query[:, None] % width
    bias = bias - cross[..., None, None] * d1[:, :, None] * d2[:, None, :]
    return bias[..., :, 0], bias[..., 0, :] - bias[..., :1, 0], cross


def shared_bytes(
        content: torch.Tensor,
        bias: torch.Tensor,
        grid: Tuple[int, int],
) -> Dict[str, torch.Tensor]:
    """What the maps of all terms and of the content terms alone have in common, see the module's text.

    Of the scores of :func:`two_map_scores`: the `larger` of both maps in parts of their largest probabilities, those
    probabilities as `peaks`, (2, B, heads, H W), and `rows`, `cols`, `cross` of :func:`split_axes`, such that the
    exponential of their sum is the ratio of the first map to the second.
    """
    scores = content + bias
    content_best, best = content.amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    rows, cols, cross = split_axes(bias, grid)
    return dict(
        larger=torch.maximum(content - content_best, scores - best).exp().float(),
        peaks=torch.stack([scores.softmax(-1).amax(-1), content.softmax(-1).amax(-1)]),
        rows=rows + content_best - best, cols=cols, cross=cross)


def own_bytes(maps: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The same for nets without such terms: maps, shape (B, heads, H, W, H, W), in parts of their peaks."""
    maps = maps.flatten(4).flatten(2, 3)
    peaks = maps.amax(-1)
    return dict(larger=maps / peaks.clamp(min=torch.finfo(maps.dtype).tiny)[..., None], peaks=peaks[None])


def pack_maps(parts: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """Pack the parts of :func:`shared_bytes` or :func:`own_bytes`, with the finest step that leaves the page its size.

    A step is one by the number of `levels`, which is returned too, of row and column scores a third of that.
    """
    fixed: Dict[str, str] = {name: pack(parts[name].float()) for name in ('peaks', 'cross') if name in parts}
    for levels in LEVELS:
        packed = {**fixed, 'larger': pack(quantise(parts['larger'], 1 / levels, torch.uint8))}
        for name in ('rows', 'cols'):
            if name in parts:
                packed[name] = pack(quantise(parts[name], 1 / (3 * levels), torch.int32))
        if sum(map(len, packed.values())) * 3 / 4 <= BYTES_AN_ENTRY * max(ENTRIES, parts['larger'].numel()):
            break
    return dict(packed, levels=levels)


def picture_uri(model: nn.Module, image: torch.Tensor) -> str:
    """What a net sees, shape (C, height, width) as it takes it, as PNG in a data URI."""
    pixels = (to_picture(model, image) * 255).round().byte()
    file = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(file, 'png')
    return 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()


def check_entries(entries: int) -> None:
    """Raise a ValueError if maps of so many numbers are too many for a page."""
    if entries > MAX_ENTRIES:
        raise ValueError(
            f'images: make attention maps of {entries:,} numbers for a net that looks at content, and a page takes up '
            f'to {MAX_ENTRIES:,}; name fewer images or take smaller ones')


def describe_attention(model: nn.Module, batch: torch.Tensor) -> Dict[str, Any]:
    """Grid, heads of each layer and packed attention of a net, for a batch of images as it takes them.

    Raises:
        ValueError: If its attention cannot be read, or does not fit in a page.
    """
    layers = attention_layers(model)

    def tables(layer: SelfAttention2d, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> Any:
        grid = x.shape[1], x.shape[2]
        return grid, copy.deepcopy(layer.encoding).cpu().offset_tables(*grid)  # in float64, which some devices lack

    def bytes_of(layer: SelfAttention2d, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> Any:
        grid = x.shape[1], x.shape[2]
        check_entries(len(x) * sum(m.num_heads for m in layers) * (grid[0] * grid[1]) ** 2)
        return grid, shared_bytes(*two_map_scores(layer, x, key), grid)

    if not looks_at_content(model):
        grids, parts = zip(*look_into(model, SelfAttention2d, batch[:1], tables))
        packed = {name: pack(torch.cat(heads)) for name, *heads in zip(('rows', 'cols', 'cross'), *parts)}
        return dict(grid=grids[0], heads=[len(rows) for rows, *_ in parts], tables=packed)
    if all(isinstance(m, SelfAttention2d) and m.key is not None and m.relative for m in layers):
        grids, parts = zip(*look_into(model, SelfAttention2d, batch, bytes_of))
    else:
        maps = attention_maps(model, batch)
        check_entries(sum(m.numel() for m in maps))
        grids, parts = zip(*(((m.shape[2], m.shape[3]), own_bytes(m)) for m in maps))
    if len(set(grids)) > 1:
        raise ValueError(f'model={type(model).__name__}: its layers have grids of several sizes, {sorted(set(grids))}')
    # heads of all layers side by side
    joined = {name: torch.cat([p[name] for p in parts], dim=2 if name == 'peaks' else 1) for name in parts[0]}
    return dict(grid=grids[0], heads=[p['peaks'].shape[2] for p in parts], maps=pack_maps(joined))


def describe_footprints(model: nn.Module, batch: torch.Tensor) -> Dict[str, Any]:
    """Grid of the finest layer, weight maps of each layer and packed weights of a net of vector attention."""
    layers = footprint_weights(model, batch)
    check_entries(sum(weights.numel() for weights in layers))
    shape = layers[0].shape[-2:]
    packed = []
    for weights in layers:
        step = float(weights.abs().max()) / 127 or 1.
        packed.append(dict(grid=weights.shape[2:4], step=step, weights=pack(quantise(weights, step, torch.int8))))
    signed = any(bool((weights < 0).any()) for weights in layers)
    return dict(
        grid=max(weights.shape[2:4] for weights in layers),
        heads=[weights.shape[1] for weights in layers],
        footprints=dict(shape=shape, middle=0. if signed else 1 / shape.numel(), layers=packed))


def describe_predictions(model: nn.Module, batch: torch.Tensor, labels: Sequence[str]) -> List[Dict[str, Any]]:
    """The three most probable classes of each picture, and its true one, each with its probability."""
    with torch.no_grad():
        probs = private_copy(model)(batch).float().softmax(-1)
    names = class_names(model, probs.shape[1])
    predictions: List[Dict[str, Any]] = []
    for row in probs.tolist():
        by_name = dict(zip(names, row))
        predictions.append(dict(top=sorted(by_name.items(), key=lambda entry: -entry[1])[:3]))
        if labels:
            label = labels[len(predictions) - 1]
            predictions[-1]['label'] = (label, by_name.get(label))
    return predictions


def describe_net(
        name: str,
        model: nn.Module,
        images: Sequence[Image.Image],
        labels: Sequence[str],
        caption: str,
) -> Dict[str, Any]:
    """What the page holds of a net: name, pictures, predictions, attention."""
    batch = preprocess(model, images)
    attention = (describe_footprints if has_footprints(model) else describe_attention)(model, batch)
    return dict(
        name=name,
        caption=caption,
        **attention,
        layers=[layer.capitalize() for layer in layer_names(model, len(attention['heads']))],
        pictures=[picture_uri(model, image) for image in batch],
        predictions=describe_predictions(model, batch, labels),
    )


def explorer_page(
        models: Mapping[str, nn.Module],
        images: Mapping[str, Image.Image],
        labels: Sequence[str] = (),
        captions: Sequence[str] = (),
) -> str:
    """The explorer of nets and pictures, as one page that needs nothing else.

    Args:
        models: Nets to show side by side, by name, with timm configurations. Zoo nets with :class:`SelfAttention2d` or
            :class:`SanAttention2d` layers, and transformers that :func:`attention_maps` can read.
        images: Pictures of any size, by name, preprocessed as each net's configuration says.
        labels: True class of each picture, if known.
        captions: A line on each net, such as where its weights are from.

    Returns:
        HTML.

    Raises:
        ValueError: If there are no nets or no pictures, not one label per picture or caption per net, or a net has no
            attention that can be read.
    """
    if not models or not images:
        raise ValueError('models and images: needs one of each at least')
    for argument, given, needed in (('labels', labels, images), ('captions', captions, models)):
        if given and len(given) != len(needed):
            raise ValueError(f'{argument}={list(given)}: needs none, or one for each of {list(needed)}')
    named = tqdm(models.items(), unit='net', leave=False, disable=None)
    nets = [
        describe_net(name, model, list(images.values()), labels, caption)
        for (name, model), caption in zip(named, captions or [''] * len(models))]
    # inside a script element only "<" can end it
    data = json.dumps(dict(images=list(images), nets=nets)).replace('<', '\\u003c')
    return fill_page(
        'explorer.html', title=html.escape(', '.join(models)), data=data, style=read('style.css'),
        script=''.join(map(read, SCRIPTS)))
