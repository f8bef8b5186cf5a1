"""Inclusion of nets in richer nets. Each step is exact, also at the borders:

- quadratic in general quadratic: the square root of the precision is ``S = spread I``;
- quadratic in learned: a score is a function of the row offset plus a function of the column offset;
- position in learned + content: the query's bias holds the scores, query and key weights are zero;
- position in position + further terms of equation (8): queries and ``u`` are zero;
- few heads in many: the values of the new heads are zero.
"""
import copy
from typing import Any, Dict, FrozenSet, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.models._input import get_model_input_config

from timm_selfconv.layers import LearnedEncoding, QuadraticEncoding, SelfAttention2d
from timm_selfconv.layers.parameters import check_dense
from timm_selfconv.models import SelfAttentionNet
from .pruning import check_net

__all__ = ['include']

STEPS = (
    'quadratic -> quadratic_gen, quadratic -> learned, position -> learned content + content_position, '
    'position -> position and further terms, heads -> more heads')
POSITION = frozenset({'position'})


def kind(attn: SelfAttention2d) -> Tuple[str, FrozenSet[str]]:
    return 'none' if attn.encoding is None else attn.kind, frozenset(attn.terms)


def describe(model: SelfAttentionNet) -> str:
    name = getattr(model, 'pretrained_cfg', {}).get('architecture', type(model).__name__)
    encoding, terms = kind(model.blocks[0].attn)
    heads = model.num_heads[:1] if len(set(model.num_heads)) == 1 else model.num_heads
    return f"{name} ({encoding}: {' + '.join(sorted(terms))}; heads {', '.join(map(str, heads))})"


def factor_scores(scores: torch.Tensor, channels: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """A table, shape (offsets, channels), and keys, (heads, channels), with ``keys @ table.T == scores``.

    Similar norms in all channels round least in float16 and give every entry a gradient.
    """
    sizes = scores.norm(dim=1, keepdim=True).clamp(min=1.).sqrt()
    left, singular, right = torch.linalg.svd(scores / sizes, full_matrices=False)
    rank = min(len(singular), channels)
    if bool((singular[rank:] > 1e-12 * singular[:1]).any()):
        raise ValueError(f'scores of {len(scores)} heads do not fit in {channels} channels of its tables')
    basis = nn.init.orthogonal_(scores.new_empty(rank, channels), generator=torch.Generator().manual_seed(0))
    return right[:rank].T * singular[:rank] @ basis, sizes * (left[:, :rank] @ basis)


def as_tables(source: Any, encoding: LearnedEncoding, scale: float = 1.) -> Dict[str, torch.Tensor]:
    """Tables and keys by name: their products times ``scale`` are the source's scores."""
    rows, cols, cross = source.offset_tables(*((len(t) + 1) // 2 for t in (encoding.row_table, encoding.col_table)))
    if cross.any():
        raise ValueError('its encoding needs separate rows and columns, but a full precision couples them')
    channels = encoding.row_table.shape[1]
    rows, cols = ((scores - scores.amax(dim=1, keepdim=True)) / scale for scores in (rows, cols))
    (row_table, row_keys), (col_table, col_keys) = factor_scores(rows, channels), factor_scores(cols, channels)
    return dict(row_table=row_table, row_keys=row_keys, col_table=col_table, col_keys=col_keys)


def as_gaussians(source: nn.Module, encoding: nn.Module) -> Dict[str, torch.Tensor]:
    if not isinstance(source, QuadraticEncoding) or not isinstance(encoding, QuadraticEncoding) or (
            source.full > encoding.full):
        raise ValueError('its encoding cannot express the encoding of the model')
    spreads = source.spreads
    if encoding.full and not source.full:
        spreads = torch.diag_embed(spreads[:, None].expand(-1, 2))
    return dict(centers=source.centers, spreads=spreads)


def include_scores(source: SelfAttention2d, target: SelfAttention2d) -> None:
    """Set the scores of the first heads of a target to the scores of a source."""
    (_, terms), (encoding, rich_terms) = kind(source), kind(target)
    given, filled = ({name.removeprefix('encoding.'): t for name, t in attn.state_dict().items()
                      if not name.startswith(('value.', 'proj.'))} for attn in (source, target))
    if kind(source) == kind(target):
        zeros = filled.keys() - given.keys()  # biases
        if given.keys() - filled.keys():
            raise ValueError(f'it has no {min(given.keys() - filled.keys())}')
    elif terms == POSITION and 'position' in rich_terms:
        change = as_tables if encoding == 'learned' else as_gaussians
        given = change(source.encoding, target.encoding)
        zeros = {'query.weight', 'query.bias', 'key_bias'}
    elif terms == POSITION and encoding == 'learned' and 'content_position' in rich_terms:
        if 'query.bias' not in filled:
            raise ValueError('its queries have no bias to hold position scores (qk_bias=True)')
        given = as_tables(source.encoding, target.encoding, target.scale)
        # the first half of a query is scored against the row table, the second against the column table
        given['query.bias'] = torch.cat([given['row_keys'], given['col_keys']], dim=1).flatten()
        zeros = {'query.weight', 'key.weight', 'key.bias'}
    else:
        raise ValueError('its attention cannot express the attention of the model')
    for name, tensor in filled.items():  # heads come first, but tables and numbers have none
        if name in given:
            if name.endswith('table') and tensor.shape != given[name].shape:
                raise ValueError('its tables are for another grid (create it with the same img_size)')
            tensor[:len(given[name])] = given[name].to(tensor)
        elif name in zeros:
            tensor[:len(tensor) // target.num_heads * source.num_heads] = 0.


def include_values(source: SelfAttention2d, target: SelfAttention2d) -> None:
    if isinstance(target.proj, nn.Identity):
        source = source.fuse()
    elif isinstance(source.proj, nn.Identity):
        nn.init.eye_(target.proj.weight)
        nn.init.zeros_(target.proj.bias)
    else:
        target.proj.load_state_dict(source.proj.state_dict())
    target.value.weight.zero_()
    target.value.weight[:, :source.value.weight.shape[1]] = source.value.weight.to(target.value.weight)
    target.value.bias.copy_(source.value.bias)


def traits(model: SelfAttentionNet) -> Dict[str, Any]:
    """Keyword arguments that both nets must share."""
    block: Any = model.blocks[0]
    return dict(
        patch_size=model.patch_size,
        in_chans=model.in_chans,
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        embed_dim=model.num_features,
        depth=model.depth,
        mlp_dim=block.mlp.fc1.out_features,
        act_layer=type(block.mlp.act).__name__.lower(),
        norm_eps=block.norm1.eps,
    )


def create_target(name: str, model: SelfAttentionNet) -> SelfAttentionNet:
    if not timm.is_model(name) or timm.model_entrypoint(name).__module__ != SelfAttentionNet.__module__:
        raise ValueError(f'target={name!r}: needs a SelfAttentionNet, or the registered name of one')
    default: Any = timm.create_model(name, device='meta')
    wanted = {key: value for key, value in traits(model).items() if value != traits(default)[key]}
    if hasattr(model, 'pretrained_cfg'):  # made by timm, which keeps the image size there
        img_size = get_model_input_config(model)['input_size'][1:]
        if img_size != get_model_input_config(default)['input_size'][1:]:
            wanted['img_size'] = img_size
    first = next(model.parameters())
    try:
        net: Any = timm.create_model(name, **wanted, device=first.device, dtype=first.dtype)
    except KeyError as e:  # timm has another name for the activation
        raise ValueError(f'target={name!r}: cannot be made with {wanted}, give a net ({e})') from e
    return net


def copy_module(source: nn.Module, target: nn.Module, name: str) -> None:
    given, filled = (
        {part: type(module) for part, module in net.get_submodule(name).named_modules(prefix=name)}
        for net in (source, target))
    for part in {**given, **filled}:
        if given.get(part) is not filled.get(part):
            raise ValueError(f'its {part} is {filled.get(part)}, needs {given.get(part)}')
    target.get_submodule(name).load_state_dict(source.get_submodule(name).state_dict())


@torch.no_grad()
def fill(target: SelfAttentionNet, model: SelfAttentionNet) -> None:
    """Fill a target so that it computes the same as a model."""
    for (key, value), wanted in zip(traits(target).items(), traits(model).values()):
        if value != wanted:
            raise ValueError(f'needs {key}={wanted!r}, has {value!r}')
    if len(target.blocks) < len(model.blocks):
        raise ValueError('its layers share one block')
    if len(target.blocks) > len(model.blocks) and model.blocks[0].attn.key is not None:
        raise ValueError('its layers do not share their keys')
    copy_module(model, target, 'stem')
    copy_module(model, target, 'head')
    for layer, block in enumerate(target.blocks):
        source: Any = model.blocks[layer % len(model.blocks)]
        for name in ('norm1', 'mlp', 'norm2'):
            copy_module(source, block, name)
        if source.attn.num_heads > block.attn.num_heads:
            raise ValueError(
                f'needs at least {source.attn.num_heads} heads in this layer, has {block.attn.num_heads}')
        include_scores(source.attn, block.attn)
        include_values(source.attn, block.attn)


def include(model: nn.Module, target: Union[str, nn.Module]) -> SelfAttentionNet:
    """Copy a net into one with a more general attention; mode and logits (up to rounding) stay the same.

    Gradients reach every new parameter within two steps. Position scores are large, so train at a low learning rate.

    Args:
        model: A :class:`SelfAttentionNet`, which stays unchanged. Merge its adapters (LoRA) first.
        target: Registered name of the richer net, created with the model's sizes (channels, depth, classes, image size)
            and its own encoding, terms and heads; or a net, which is copied.

    Raises:
        ValueError: If the target cannot express the model, the nets differ in something else, or a part of either is
            wrapped, parametrized or hooked.
    """
    net = check_net(model)
    check_dense(net)
    rich = create_target(target, net) if isinstance(target, str) else copy.deepcopy(check_net(target))
    check_dense(rich)
    try:
        fill(rich, net)
    except ValueError as e:
        raise ValueError(
            f'model={describe(net)} is not in target={describe(rich)}: {e}; possible steps are {STEPS}') from e
    return rich.train(net.training)
