"""The networks that `single_bits.py` and `single_bits_vgg.py` train, in floats and in single bits.

A binary block is normalisation, signs, product, ReLU, as in XNOR-Net: signs right after a ReLU would all be the same.
The first and the last layer stay real in both, and the float network has the same layers in the same order.
"""

from __future__ import annotations

import torch
from torch import nn

from undertow.small.binary_layers import BinaryConv2d, BinaryLinear


def _convolution(channels: int, filters: int, kernel: int, padding: int, is_binary: bool) -> list[nn.Module]:
    kind = BinaryConv2d if is_binary else nn.Conv2d
    return [nn.BatchNorm2d(channels), kind(channels, filters, kernel, padding=padding), nn.ReLU()]


def _linear(features: int, outputs: int, is_binary: bool) -> list[nn.Module]:
    kind = BinaryLinear if is_binary else nn.Linear
    return [nn.BatchNorm1d(features), kind(features, outputs), nn.ReLU()]


def lenet5(is_binary: bool) -> nn.Module:
    """LeNet-5's layers with 32 and 64 filters and 512 units, and normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *_convolution(32, 64, 5, 0, is_binary),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_linear(64 * 4 * 4, 512, is_binary),
        nn.Linear(512, 10),
    )


def vgg(is_binary: bool, width: int = 128) -> nn.Module:
    """Six 3x3 convolutions in three blocks for 32x32 images, and two hidden layers of 1,024 (Courbariaux et al. 2016).

    With a width of 128 it has 14 M parameters.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for block, multiple in enumerate((1, 2, 4)):
        for _ in range(1 if block == 0 else 2):
            layers += _convolution(channels, multiple * width, 3, 1, is_binary)
            channels = multiple * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), *_linear(channels * 4 * 4, 1024, is_binary), *_linear(1024, 1024, is_binary)]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int = 500) -> float:
    """The share of images whose label has the largest output; the model is left as it was."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        num_right = sum(
            int((model(part).argmax(1) == wanted).sum())
            for part, wanted in zip(images.split(batch), labels.split(batch), strict=True)
        )
    model.train(was_training)
    return num_right / len(images)
