"""ResNet-50 (He, Zhang, Ren & Sun, "Deep residual learning for image recognition", CVPR 2016): 25,557,032 parameters.

In: images (batch, 3, height, width), at least 32x32. Out: logits (batch, num_classes).

A block that halves the image does so in its 3x3 convolution (Goyal et al., "Accurate, large minibatch SGD", 2017). The
2016 paper does it in the 1x1 convolution before, which never sees three quarters of the pixels.
"""

from collections.abc import Sequence

import torch
from torch import nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3, 1x1 up to four times `width`, plus the input."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A stem that quarters the image, stages of bottlenecks, the mean over the image, a linear layer."""

    def __init__(self, num_classes: int, width: int, depths: Sequence[int]):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels = width
        stages = []
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = EXPANSION * width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(x))
        return self.classifier(self.pool(x).flatten(1))


def resnet50(num_classes: int = 1000, width: int = 64, depths: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    """ResNet-50; `depths` are the numbers of bottlenecks in each stage, and the first stage is `width` wide."""
    return ResNet(num_classes, width, depths)
