"""A tiny convolutional network with BatchNorm2d, as a user's own model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block of a convolution, a norm and a ReLU. If the norm comes last, backward begins with it."""

    def __init__(self, channels: int, norm_last: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.norm_last = norm_last

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        y = self.conv(x)
        return x + (self.bn(torch.relu(y)) if self.norm_last else torch.relu(self.bn(y)))


class ConvNet(nn.Module):
    """A network that classifies the 4 x 4 cells of a picture. Each cell is one token."""

    def __init__(self, classes: int = 61, channels: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(classes, channels)
        self.blocks = nn.ModuleList(Block(channels, norm_last) for norm_last in (False, True, False))
        self.head = nn.Linear(channels, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, 16) to (batch, 16, classes)."""
        x = self.embedding(tokens).transpose(1, 2).unflatten(2, (4, 4))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(2).transpose(1, 2).contiguous())
