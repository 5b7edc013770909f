"""VGG-16 (Simonyan & Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015,
configuration D: 138,357,544 parameters) and a small variant for 32x32 images with BatchNorm (Ioffe & Szegedy, ICML
2015) before every ReLU.

In: images (batch, 3, image_size, image_size). Out: logits (batch, num_classes).
"""

from collections.abc import Sequence

import torch
from torch import nn

# Each block: 3x3 convolutions as (how many, width as a multiple of the first block's), then 2x2 max pooling.
CONFIGURATION_D = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
SMALL = ((2, 1), (2, 2), (2, 4))


class VGG(nn.Module):
    """Blocks of 3x3 convolutions, then a classifier."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential):
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.classifier(x.flatten(1))


def convolution_blocks(blocks: Sequence[tuple[int, int]], width: int, has_batch_norm: bool) -> nn.Sequential:
    """The convolutional part; each block halves the image."""
    layers: list[nn.Module] = []
    channels = 3
    for num_convolutions, multiple in blocks:
        for _ in range(num_convolutions):
            # BatchNorm subtracts the mean, so a bias would have no effect.
            layers.append(nn.Conv2d(channels, multiple * width, 3, padding=1, bias=not has_batch_norm))
            channels = multiple * width
            if has_batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU(inplace=True))
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg16(
    num_classes: int = 1000, width: int = 64, hidden: int = 4096, image_size: int = 224, dropout: float = 0.5
) -> VGG:
    """VGG-16; `image_size` is a multiple of 32."""
    features = convolution_blocks(CONFIGURATION_D, width, has_batch_norm=False)
    classifier = nn.Sequential(
        nn.Linear(8 * width * (image_size // 32) ** 2, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )
    return VGG(features, classifier)


def vgg_small(
    num_classes: int = 10, width: int = 64, hidden: int = 512, image_size: int = 32, dropout: float = 0.5
) -> VGG:
    """Six convolutions with BatchNorm and two linear layers; `image_size` is a multiple of 8."""
    features = convolution_blocks(SMALL, width, has_batch_norm=True)
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(4 * width * (image_size // 8) ** 2, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )
    return VGG(features, classifier)
