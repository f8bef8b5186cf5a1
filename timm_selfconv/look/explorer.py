"""The attention explorer: one page, with no server and no network, that shows where every query of a net looks.

The page draws any query's maps of all heads from what this module packs into it:

- Attention by position only scores by offset. The score of offset ``(d1, d2)`` is ``rows[d1] + cols[d2] +
  cross d1 d2`` (the last only for a full precision), so a head takes two tables and one number, in float64.
- Attention that looks at content takes a byte for every query and key: the probability in parts of the map's largest,
  right to one step, ``1 / LEVELS`` of it. Where a net has terms of both kinds there are three maps: of all terms, of
  those in offsets, and of those that look at keys.

Each layer has a grid of its own; where the class token looks are layers too, of a single query.

Where the history of the net's training is at hand, it holds where every head looked after each epoch, too.
"""
import base64
import copy
import html
import io
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from tqdm import tqdm

from timm_selfconv.data import preprocess, rank_classes, to_picture
from timm_selfconv.layers import SelfAttention2d
from timm_selfconv.layers.kernels.positions import dense_scores
from timm_selfconv.weights.history import find_history, read_history
from .attention_maps import attention_layers, attention_maps, class_attention, footprint_weights, has_class_token, \
    has_footprints, layer_names, look_into, looks_at_content, private_copy

__all__ = ['explorer_page']

PAGE = Path(__file__).with_name('page')
LEVELS = 127
MAX_ENTRIES = 2 ** 27


def read_part(name: str) -> str:
    """A file of a page; a script with the modules that it imports before it, each once, as one module."""
    text, modules = (PAGE / name).read_text(encoding='utf-8'), [name]
    if not name.endswith('.js'):
        return text
    for module in modules:
        modules += re.findall(r"^import [^;]* from '\./(.*)';$", (PAGE / module).read_text(encoding='utf-8'), re.M)
    files = [(PAGE / module).read_text(encoding='utf-8') for module in dict.fromkeys(reversed(modules))]
    return re.sub(r'^import [^;]*;\n|^export ', '', ''.join(files), flags=re.M)


def fill_page(name: str, **slots: str) -> str:
    """A page with its slots filled: {{such}} by what is given, {{such.js}} by the file."""
    return re.sub(
        r'\{\{([\w.-]+)\}\}', lambda slot: read_part(slot[1]) if '.' in slot[1] else slots[slot[1]], read_part(name))


def pack(x: torch.Tensor) -> str:
    """A tensor's bytes, little endian, as zlib stream in base64: what the browser's DecompressionStream reads."""
    array = x.detach().cpu().contiguous().numpy()
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder('<')).tobytes())).decode()


def quantise(x: torch.Tensor, step: float, dtype: torch.dtype) -> torch.Tensor:
    """Whole multiples of a step, rounded, those out of the integer type's range held to it."""
    limits = torch.iinfo(dtype)
    return (x / step).round().clamp(limits.min, limits.max).to(dtype)


def term_maps(layer: SelfAttention2d, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> torch.Tensor:
    """A layer's maps of all terms, of those in offsets (content-position, position), of those that look at keys.

    From x, shape (B, H, W, dim), come maps of shape (3, B, heads, H W, H W).
    """
    parts = layer.score_parts(x, key)
    scores, bias = dense_scores(*parts), dense_scores(None, None, *parts[2:])
    return torch.stack([scores, bias.expand_as(scores), scores - bias]).softmax(-1)


def pack_maps(maps: torch.Tensor, **more: Any) -> Dict[str, Any]:
    """A layer of maps, shape (views, B, heads, queries, H, W), as bytes in parts of each query's largest probability.

    Queries are on the grid of the keys, unless ``more`` says otherwise.
    """
    shape = maps.shape[-2:]
    peaks = maps.amax((-2, -1)).float()
    parts = maps / peaks.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]
    packed = dict(
        views=len(maps), levels=LEVELS, peaks=pack(peaks), parts=pack(quantise(parts, 1 / LEVELS, torch.uint8)))
    return dict(dict(heads=maps.shape[2], queries=shape, shape=shape, maps=packed), **more)


def image_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, 'png')
    return 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()


def picture_uri(model: nn.Module, image: torch.Tensor) -> str:
    """An image as a net takes it, shape (C, height, width), as PNG in a data URI."""
    return image_uri(Image.fromarray((to_picture(model, image) * 255).round().byte().contiguous().numpy()))


def check_entries(entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise ValueError(
            f'images: make attention maps of {entries:,} numbers, and a page takes up to {MAX_ENTRIES:,}; name fewer '
            'images or take smaller ones')


def describe_attention(model: nn.Module, batch: torch.Tensor, part: str = 'both') -> Dict[str, Any]:
    """Packed attention of each layer of a net, for a batch of images, or for the first where all have the same.

    Raises:
        ValueError: If its attention cannot be read, or does not fit in a page.
    """
    layers = attention_layers(model)
    own = part == 'both' and all(isinstance(m, SelfAttention2d) for m in layers)
    content = part != 'position' and looks_at_content(model)
    batch = batch if content else batch[:1]

    def tables(layer: SelfAttention2d, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> Dict[str, Any]:
        grid = x.shape[1:3]
        tables = copy.deepcopy(layer.encoding).cpu().offset_tables(*grid)  # in float64, which some devices lack
        return dict(heads=layer.num_heads, queries=grid, shape=grid, tables=list(map(pack, tables)))

    def maps_of(layer: SelfAttention2d, x: torch.Tensor, key: Optional[torch.Tensor] = None) -> Dict[str, Any]:
        grid = x.shape[1:3]
        check_entries(3 * len(x) * sum(m.num_heads for m in layers) * (grid[0] * grid[1]) ** 2)
        return pack_maps(term_maps(layer, x, key).unflatten(-1, grid))

    if own and not content:
        packed = look_into(model, SelfAttention2d, batch, tables)
    elif own and all(m.key is not None and m.relative for m in layers):
        packed = look_into(model, SelfAttention2d, batch, maps_of)
    else:
        seen = attention_maps(model, batch[:1], part)
        check_entries(len(batch) * sum(m.numel() for m in seen))
        if len(batch) > 1:
            seen = attention_maps(model, batch, part)
        packed = [pack_maps(m.flatten(2, 3)[None]) for m in seen]
    names = [name.capitalize() for name in layer_names(model, len(packed))]
    packed = [dict(layer, name=name) for layer, name in zip(packed, names)]
    if has_class_token(model) and part == 'both':
        token = class_attention(model, batch)
        if len(token) < len(names):
            names = [f'Class layer {i}' for i in range(len(token))]
        packed += [
            pack_maps(m[None, :, :, None], queries=(1, 1), name=f'{name}, class token', token=True)
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
            middle=0. if signed else 1 / shape.numel(), weights=pack(quantise(weights, step, torch.int8))))
    return dict(content=True, layers=packed)


def describe_predictions(model: nn.Module, batch: torch.Tensor, labels: Sequence[str]) -> List[Dict[str, Any]]:
    """The three most probable classes of each picture, and its true one, each with its probability."""
    return [
        dict(top=ranked[:3], label=None if label is None else (label, dict(ranked).get(label)))
        for ranked, label in itertools.zip_longest(rank_classes(private_copy(model), batch), labels)]


def describe_film(run: Path, heads: Sequence[int], grid: Tuple[int, int]) -> Optional[Dict[str, Any]]:
    """Centres and covariances of a net's heads after each epoch, from its history; None if they follow the image."""
    history = read_history(run)
    rows = history['rows']
    if any(row['heads'] is None for row in rows):
        return None
    counts = [[len(layer) for layer in row['heads']] for row in rows]
    if history['grid'] != list(grid) or any(count != list(heads) for count in counts):
        raise ValueError(f'{run}: is of a net with other heads or another grid than {list(heads)} on {list(grid)}')
    return dict(
        heads=pack(torch.tensor([[head for layer in row['heads'] for head in layer] for row in rows])),
        epochs=[row['epochs'] for row in rows], loss=[row.get('train_loss') for row in rows],
        top1=[row.get('eval_top1') for row in rows])


def describe_net(
        name: str,
        model: nn.Module,
        images: Sequence[Image.Image],
        labels: Sequence[str],
        caption: str,
        run: Optional[Union[str, Path]],
        part: str,
) -> Dict[str, Any]:
    """Data of a net for the page: name, pictures, predictions, attention, film."""
    batch = preprocess(model, images)
    vector = part == 'both' and has_footprints(model)
    attention = describe_footprints(model, batch) if vector else describe_attention(model, batch, part)
    grid = max(layer['queries'] for layer in attention['layers'])
    history = None if run is None else find_history(run)
    return dict(
        name=name,
        caption=caption,
        grid=grid,
        **attention,
        film=None if history is None else describe_film(
            history, [layer['heads'] for layer in attention['layers']], grid),
        average=picture_uri(model, batch.mean(0)),
        pictures=[picture_uri(model, image) for image in batch],
        predictions=describe_predictions(model, batch, labels),
    )


def explorer_page(
        models: Mapping[str, nn.Module],
        images: Mapping[str, Image.Image],
        labels: Sequence[str] = (),
        captions: Sequence[str] = (),
        runs: Sequence[Optional[Union[str, Path]]] = (),
        part: str = 'both',
) -> str:
    """The explorer of nets and pictures, as a single page that works offline.

    Args:
        models: Nets to show side by side, by name, with timm configurations: all that :func:`attention_maps` or
            :func:`footprint_weights` can read.
        images: Pictures of any size, by name, preprocessed as each net's configuration says.
        labels: True class of each picture, if known.
        captions: A line on each net, such as where its weights are from.
        runs: Folder of each net's run, or a net whose history may ship, for a film of its training; None for none.
        part: What to see of ConViT's gated attention, see :func:`attention_maps`.

    Returns:
        HTML.

    Raises:
        ValueError: If there are no nets or no pictures, not one label per picture or caption or run per net, a net
            has no attention that can be read, or a history is another net's.
    """
    if not models or not images:
        raise ValueError('models and images: needs one of each at least')
    for argument, given, needed in (
            ('labels', labels, images), ('captions', captions, models), ('runs', runs, models)):
        if given and len(given) != len(needed):
            raise ValueError(f'{argument}={list(given)}: needs none, or one for each of {list(needed)}')
    named = tqdm(models.items(), unit='net', leave=False, disable=None)
    nets = [
        describe_net(name, model, list(images.values()), labels, caption, run, part)
        for (name, model), caption, run in zip(named, captions or [''] * len(models), runs or [None] * len(models))]
    # inside a script element only "<" can end it
    data = json.dumps(dict(images=list(images), nets=nets)).replace('<', '\\u003c')
    return fill_page('explorer.html', title=html.escape(', '.join(models)), data=data)
