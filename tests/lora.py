"""Adapters like peft's, to replace linear maps of a net in tests."""
import torch.nn as nn


class Lora(nn.Module):
    """A linear map or 1x1 convolution plus the product of two small ones."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        rows, cols = base_layer.weight.shape[:2]
        kind, size = (nn.Conv2d, [1]) if isinstance(base_layer, nn.Conv2d) else (nn.Linear, [])
        self.base_layer = base_layer
        self.a, self.b = (
            kind(*sizes, *size, bias=False).to(base_layer.weight) for sizes in ((cols, rank), (rank, rows)))

    def weight_in_all(self):
        small = self.b.weight.flatten(1) @ self.a.weight.flatten(1)
        return self.base_layer.weight + small.view_as(self.base_layer.weight)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))
