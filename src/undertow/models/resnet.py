"""ResNet-50 (He, Zhang, Ren & Sun, "Deep residual learning for image recognition", CVPR 2016): 25,557,032 parameters.
ResNet-18 for small images: 11,173,962 parameters with 10 classes.

In: images (batch, 3, height, width), at least 32x32. Out: logits (batch, num_classes).

For images of 32x32 the stem is one 3x3 convolution that keeps their size, as in the paper's own networks for CIFAR-10
(section 4.2); the stages are those of its ResNet-18 (table 1), with 1x1 convolutions as shortcuts.

A bottleneck that halves the image does so in its 3x3 convolution (Goyal et al., "Accurate, large minibatch SGD", 2017).
The 2016 paper does it in the 1x1 convolution before, which never sees three quarters of the pixels.
"""

from collections.abc import Sequence

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3, 1x1 up to four times `width`, plus the input."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = make_shortcut(channels, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class Basic(nn.Module):
    """Two 3x3 convolutions, plus the input."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = make_shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def make_shortcut(channels: int, outputs: int, stride: int) -> nn.Module:
    """The input, projected where its shape is not that of the output."""
    if stride == 1 and channels == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """A stem, stages of blocks, the mean over the image, a linear layer."""

    def __init__(
        self,
        num_classes: int,
        width: int,
        depths: Sequence[int],
        block: type[Bottleneck] | type[Basic] = Bottleneck,
        has_small_stem: bool = False,
    ):
        super().__init__()
        self.stem = make_stem(width, has_small_stem)
        channels = width
        stages = []
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride))
                channels = block.expansion * width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(x))
        return self.classifier(self.pool(x).flatten(1))


def make_stem(width: int, is_small: bool) -> nn.Sequential:
    """The layers before the stages: they quarter the image, or keep it."""
    if is_small:
        return nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
    return nn.Sequential(
        nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def resnet50(num_classes: int = 1000, width: int = 64, depths: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    """ResNet-50; `depths` are the numbers of bottlenecks in each stage, and the first stage is `width` wide."""
    return ResNet(num_classes, width, depths)


def resnet18_small(num_classes: int = 10, width: int = 64, depths: Sequence[int] = (2, 2, 2, 2)) -> ResNet:
    """ResNet-18 for images of 32x32; `depths` are the numbers of blocks in each stage."""
    return ResNet(num_classes, width, depths, Basic, has_small_stem=True)
