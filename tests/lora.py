"""Adapters like peft's, to replace linear maps of a net in tests."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Lora(nn.Module):
    """A linear map or 1x1 convolution plus the product of two small matrices, with dropout in training."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        rows, cols = base_layer.weight.shape[:2]
        self.base_layer = base_layer
        self.a = nn.Parameter(0.5 * torch.randn(rank, cols).to(base_layer.weight) / cols ** 0.5)
        self.b = nn.Parameter(0.5 * torch.randn(rows, rank).to(base_layer.weight))
        self.train(base_layer.training)

    def weight_in_all(self):
        return self.base_layer.weight + (self.b @ self.a).view_as(self.base_layer.weight)

    def forward(self, x):
        out = self.base_layer(x)
        x = F.dropout(x, 0.5, self.training)
        update = (self.b @ self.a).view_as(self.base_layer.weight)
        return out + (F.linear(x, update) if update.dim() == 2 else F.conv2d(x, update))
