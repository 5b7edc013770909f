"""The multi-layer perceptron: x -> W x + b, ReLU, repeated (Rumelhart, Hinton & Williams, "Learning representations by
back-propagating errors", Nature 323, 1986; ReLU: Glorot, Bordes & Bengio, AISTATS 2011).

In: vectors (batch, sizes[0]). Out: logits (batch, sizes[-1]).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x)


def mlp(sizes: Sequence[int] = (784, 4096, 4096, 10)) -> MLP:
    """A perceptron with these layer sizes, input and output included."""
    return MLP(sizes)
