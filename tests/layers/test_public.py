"""Public names of timm_selfconv.layers."""
import inspect

from timm_selfconv import layers


def test_nothing_else_leaks():
    shown = {name for name, value in vars(layers).items() if name[0] != '_' and not inspect.ismodule(value)}
    assert shown == set(layers.__all__)
