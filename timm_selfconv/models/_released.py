"""Checkpoints of the papers' released code, https://github.com/epfml/attention-cnn.

Two details differ from ours: the stem orders the channels of a block (row, column, colour), and the position-only
learned layer uses its row table along the second spatial axis and its column table along the first. The layer with
content uses them as named.
"""
import re
from typing import Dict

import torch

__all__ = ['convert_released']

_NAMES = (
    (r'^features_upscale\.', 'stem.'),
    (r'^classifier\.', 'head.fc.'),
    (r'^encoder\.layer\.', 'blocks.'),
    (r'\.attention\.self\.attention_centers$', '.attn.encoding.centers'),
    (r'\.attention\.self\.attention_spreads$', '.attn.encoding.spreads'),
    (r'\.attention\.self\.(row|col)_embeddings\.weight$', r'.attn.encoding.\1_table'),
    (r'\.attention\.self\.head_keys_(row|col)\.weight$', r'.attn.encoding.\1_keys'),
    (r'\.attention\.self\.(query|key|value)\.', r'.attn.\1.'),
    (r'\.attention\.output\.dense\.', '.attn.proj.'),
    (r'\.attention\.output\.LayerNorm\.', '.norm1.'),
    (r'\.intermediate\.dense\.', '.mlp.fc1.'),
    (r'\.output\.dense\.', '.mlp.fc2.'),
    (r'\.output\.LayerNorm\.', '.norm2.'),
)
_IGNORED = re.compile(r'(^|\.)(attention_mask|R|relative_indices)$')


def convert_released(state_dict: Dict[str, torch.Tensor], patch_size: int) -> Dict[str, torch.Tensor]:
    """Convert a flat state dict of the released code for :class:`SelfAttentionNet`."""
    out = {}
    for name, value in state_dict.items():
        if _IGNORED.search(name):
            continue
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        out[name] = value

    stem = out['stem.weight']
    out['stem.weight'] = stem.view(stem.shape[0], patch_size, patch_size, -1).permute(0, 3, 1, 2).contiguous()
    if any(name.endswith('encoding.row_keys') for name in out):  # position-only learned layers
        other = dict(row='col', col='row')
        out = {re.sub(r'(row|col)(?=_(table|keys)$)', lambda axis: other[axis[0]], n): v for n, v in out.items()}
    return out
