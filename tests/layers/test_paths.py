"""The number of functions of the package that a forward pass calls."""
import sys
from pathlib import Path

import pytest
import torch

from timm_selfconv import layers
from tiny_nets import EVERY_KIND

PACKAGE = str(Path(layers.__file__).parents[1])


@pytest.mark.parametrize('encoding,terms', EVERY_KIND)
def test_a_forward_is_at_most_9_functions_in_4_files(encoding, terms):
    attn = layers.SelfAttention2d(64, 3, terms, encoding, grid_size=(8, 8)).eval()
    seen, before = set(), sys.getprofile()

    def see(frame, event, arg):
        if event == 'call' and frame.f_code.co_filename.startswith(PACKAGE):
            seen.add(frame.f_code)

    with torch.no_grad():
        sys.setprofile(see)
        try:
            attn(torch.randn(2, 8, 8, 64))
        finally:
            sys.setprofile(before)
    assert len(seen) <= 9, sorted(code.co_name for code in seen)
    assert len({code.co_filename for code in seen}) <= 4
