"""What timm's optimisers are told: rates of their own for position encodings, and Muon's precision."""
from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, Set
from unittest.mock import patch

import torch
import torch.nn as nn
from timm.optim import muon, param_groups_weight_decay

from timm_selfconv.layers import ConvAttention, LearnedEncoding, QuadraticEncoding, SelfAttention2d

__all__ = ['muon_in_float32', 'position_groups']


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """A context in which timm's Muon orthogonalises updates in float32; it has no switch for its bfloat16."""
    exact = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
    with patch.object(muon, 'zeropower_via_newtonschulz', exact):
        yield


def position_groups(model: nn.Module, weight_decay: float, lr_scale: float) -> List[Dict[str, Any]]:
    """timm's parameter groups, those of relative position encodings apart, with another learning rate.

    Those are a few hundred numbers among millions. A query's bias belongs to them where queries meet an encoding: what
    it says of an offset is the same for all pixels, the position term of equation (8) over sqrt(D).

    Args:
        model: The net.
        weight_decay: Weight decay of all but biases, norms and what the net's ``no_weight_decay`` names.
        lr_scale: Learning rate of centres and spreads, or of learned tables, their keys and the queries' biases, as a
            multiple of the others'; timm's schedulers honour it.
    """
    encodings = [m for m in model.modules() if isinstance(m, (LearnedEncoding, QuadraticEncoding))]
    positions = {id(parameter) for encoding in encodings for parameter in encoding.parameters()}
    positions |= {id(p) for m in model.modules() if isinstance(m, ConvAttention) for p in (m.centers, m.spreads)}
    positions |= {
        id(m.query.bias) for m in model.modules()
        if isinstance(m, SelfAttention2d) and getattr(m.encoding, 'content_position', False)}
    exempt: Set[str] = getattr(model, 'no_weight_decay', set)()
    groups = []
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt):
        for apart in (False, True):
            parameters = [p for p in group['params'] if (id(p) in positions) == apart]
            if parameters:
                groups.append({**group, 'params': parameters, 'lr_scale': lr_scale if apart else 1.})
    return groups
