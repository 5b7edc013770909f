"""AlexNet (Krizhevsky, Sutskever & Hinton, "ImageNet classification with deep convolutional neural networks", NeurIPS
2012): 60,965,224 parameters.

In: images (batch, 3, image_size, image_size). Out: logits (batch, num_classes).

The paper's two GPUs are `groups=2`: convolutions 2, 4 and 5 see only the half of the channels on their own GPU. Its 224
pixels give its 55 outputs only with padding, here of two pixels. Weights are initialised as PyTorch does; the paper's
N(0, 0.01) with some biases at 1 is not reproduced.
"""

from collections.abc import Sequence

import torch
from torch import nn


def response_norm() -> nn.LocalResponseNorm:
    """The paper's local response normalisation, over n = 5 neighbouring channels."""
    # b_i = a_i / (k + alpha * sum_j a_j^2)^beta with k = 2, alpha = 1e-4, beta = 0.75; PyTorch divides alpha by n.
    return nn.LocalResponseNorm(size=5, alpha=5 * 1e-4, beta=0.75, k=2.0)


class AlexNet(nn.Module):
    """Five convolutions with overlapping 3x3 pooling, three linear layers with dropout."""

    def __init__(self, num_classes: int, channels: Sequence[int], hidden: int, image_size: int, dropout: float):
        super().__init__()
        c1, c2, c3, c4, c5 = channels
        self.features = nn.Sequential(
            nn.Conv2d(3, c1, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c1, c2, kernel_size=5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c2, c3, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c3, c4, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(c4, c5, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        size = (image_size + 2 * 2 - 11) // 4 + 1
        for _ in range(3):
            size = (size - 3) // 2 + 1
        self.classifier = nn.Sequential(
            nn.Linear(c5 * size * size, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.classifier(x.flatten(1))


def alexnet(
    num_classes: int = 1000,
    channels: Sequence[int] = (96, 256, 384, 384, 256),
    hidden: int = 4096,
    image_size: int = 224,
    dropout: float = 0.5,
) -> AlexNet:
    """AlexNet; `channels` has one entry for each of the five convolutions, and `image_size` is at least 63."""
    return AlexNet(num_classes, channels, hidden, image_size, dropout)
