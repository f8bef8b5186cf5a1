"""Parameter groups: position encodings are a few hundred numbers among millions, and learn at a rate of their own."""
from typing import Any, Dict, List, Set

import torch.nn as nn
from timm.optim import param_groups_weight_decay

from timm_selfconv.layers import ConvAttention, LearnedEncoding, QuadraticEncoding

__all__ = ['position_groups']


def position_groups(model: nn.Module, weight_decay: float, lr_scale: float) -> List[Dict[str, Any]]:
    """timm's parameter groups, those of relative position encodings apart, with another learning rate.

    Args:
        model: The net.
        weight_decay: Weight decay of all but biases, norms and what the net's ``no_weight_decay`` names.
        lr_scale: Learning rate of centres and spreads, or of learned tables and their keys, as a multiple of the
            others'; timm's schedulers honour it.
    """
    encodings = [m for m in model.modules() if isinstance(m, (LearnedEncoding, QuadraticEncoding))]
    positions = {id(parameter) for encoding in encodings for parameter in encoding.parameters()}
    positions |= {id(p) for m in model.modules() if isinstance(m, ConvAttention) for p in (m.centers, m.spreads)}
    exempt: Set[str] = getattr(model, 'no_weight_decay', set)()
    groups = []
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt):
        for apart in (False, True):
            parameters = [p for p in group['params'] if (id(p) in positions) == apart]
            if parameters:
                groups.append({**group, 'params': parameters, 'lr_scale': lr_scale if apart else 1.})
    return groups
