"""The number of functions of the package that a forward pass calls."""
import sys
from pathlib import Path

import torch

from timm_selfconv import layers
from timm_selfconv.layers import SelfAttention2d
from tiny_nets import EVERY_KIND

PACKAGE = str(Path(layers.__file__).parents[1])


def passed(layer, x):
    """Return the code of all functions of the package that a call runs."""
    seen = set()

    def see(frame, event, arg):
        if event == 'call' and frame.f_code.co_filename.startswith(PACKAGE):
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        layer(x)
    finally:
        sys.setprofile(before)
    return seen


def test_a_forward_is_at_most_9_functions_in_4_files():
    for encoding, terms in EVERY_KIND:
        attn = SelfAttention2d(64, 3, terms, encoding, grid_size=(8, 8)).eval()
        with torch.no_grad():
            functions = passed(attn, torch.randn(2, 8, 8, 64))
        assert len(functions) <= 9, (encoding, terms, sorted(code.co_name for code in functions))
        assert len({code.co_filename for code in functions}) <= 4
