"""Attention kernels that walk through a batch in groups, and the definition of each in plain operators.

- positions: position-only attention, by the row and column factors of its maps, or by maps that all images share.
- content: attention to keys, or to pixels, without a tensor of all scores.
- kernel: ``Kernel``, an operator with gradients, of a function of a group; where plain operators are needed instead.
"""
from .content import key_attention, pixel_attention
from .positions import map_attention, separable_attention

__all__ = ['key_attention', 'map_attention', 'pixel_attention', 'separable_attention']
