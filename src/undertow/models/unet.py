"""U-Net (Ronneberger, Fischer & Brox, "U-Net: convolutional networks for biomedical image segmentation", MICCAI 2015).

In: images (batch, in_channels, height, width), sides divisible by 2**depth. Out: logits (batch, num_classes, height,
width).

Unlike in the paper, the convolutions are padded, so the output is as large as the input and nothing is cropped, and a
BatchNorm comes before every ReLU.
"""

from itertools import pairwise

import torch
from torch import nn


class DoubleConvolution(nn.Sequential):
    """Twice: 3x3 convolution, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A contracting path, and an expanding path that also reads each level of the contracting one."""

    def __init__(self, in_channels: int, num_classes: int, width: int, depth: int):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.contracting = nn.ModuleList(
            DoubleConvolution(inputs, outputs) for inputs, outputs in pairwise([in_channels, *widths])
        )
        self.pool = nn.MaxPool2d(2)
        self.upsampling = nn.ModuleList(
            nn.ConvTranspose2d(2 * outputs, outputs, kernel_size=2, stride=2) for outputs in reversed(widths[:-1])
        )
        self.expanding = nn.ModuleList(DoubleConvolution(2 * outputs, outputs) for outputs in reversed(widths[:-1]))
        self.classifier = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *levels, bottom = self.contracting
        skipped = []
        for level in levels:
            x = level(x)
            skipped.append(x)
            x = self.pool(x)
        x = bottom(x)
        for upsample, level in zip(self.upsampling, self.expanding, strict=True):
            x = level(torch.cat([skipped.pop(), upsample(x)], dim=1))
        return self.classifier(x)


def unet(in_channels: int = 1, num_classes: int = 2, width: int = 64, depth: int = 4) -> UNet:
    """U-Net; the first level is `width` wide, and each of the `depth` levels below it twice as wide."""
    return UNet(in_channels, num_classes, width, depth)
