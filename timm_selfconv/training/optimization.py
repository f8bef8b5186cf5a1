"""What timm's optimisers are told: rates of their own for positions and for content, and Muon's precision."""
from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterable, Iterator, List, Set
from unittest.mock import patch

import torch
import torch.nn as nn
from timm.optim import muon, param_groups_weight_decay

from timm_selfconv.layers import ConvAttention, LearnedEncoding, QuadraticEncoding, SelfAttention2d

__all__ = ['muon_in_float32', 'scaled_groups']


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """A context in which timm's Muon orthogonalises updates in float32; it has no switch for its bfloat16."""
    exact = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
    with patch.object(muon, 'zeropower_via_newtonschulz', exact):
        yield


def scaled_groups(
        model: nn.Module,
        weight_decay: float,
        position_scale: float = 1.,
        query_key_scale: float = 1.,
) -> List[Dict[str, Any]]:
    """timm's parameter groups, those of positions and of content apart, with learning rates of their own.

    Positions are a few hundred numbers among millions. A query's bias belongs to them where queries are scored against
    an encoding: what it says of an offset is the same for all pixels, the position term of equation (8) over sqrt(D).

    Args:
        model: The net.
        weight_decay: Weight decay of all but biases, norms and what the net's ``no_weight_decay`` names.
        position_scale: Learning rate of centres and spreads, or of learned tables, their keys and the queries' biases,
            as a multiple of the others'; timm's schedulers honour it.
        query_key_scale: The same of the weights by which SelfAttention2d makes queries and keys of pixels.
    """
    scales: Dict[int, float] = {}
    for m in model.modules():
        positions: Iterable[Any] = ()
        if isinstance(m, (LearnedEncoding, QuadraticEncoding)):
            positions = m.parameters()
        elif isinstance(m, ConvAttention):
            positions = m.centers, m.spreads
        elif isinstance(m, SelfAttention2d):
            scales |= {id(linear.weight): query_key_scale for linear in (m.query, m.key) if linear is not None}
            if m.query is not None and getattr(m.encoding, 'content_position', False):
                positions = [m.query.bias]
        scales |= {id(parameter): position_scale for parameter in positions}
    exempt: Set[str] = getattr(model, 'no_weight_decay', set)()
    groups = []
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt):
        own = [scales.get(id(p), 1.) for p in group['params']]
        for scale in dict.fromkeys(own):
            parameters = [p for p, wanted in zip(group['params'], own) if wanted == scale]
            groups.append({**group, 'params': parameters, 'lr_scale': scale})
    return groups
