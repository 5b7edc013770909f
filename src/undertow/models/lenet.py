"""LeNet-300-100 and LeNet-5 (LeCun, Bottou, Bengio & Haffner, "Gradient-based learning applied to document
recognition", Proc. IEEE 86, 1998), in the form that Han, Pool, Tran & Dally prune ("Learning both weights and
connections for efficient neural networks", NeurIPS 2015): 266,610 and 431,080 parameters.

In: images (batch, 1, 28, 28). Out: logits (batch, num_classes).

So LeNet-5 is Caffe's: 20 and 50 filters, max pooling, one hidden layer of 500 with ReLU. The 1998 network has 6 and 16
filters, trainable subsampling, squashing functions, and layers of 120 and 84.
"""

import torch
from torch import nn


class LeNet300(nn.Module):
    """Two hidden layers of 300 and 100 units."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        return self.fc3(x)


class LeNet5(nn.Module):
    """Two 5x5 convolutions, each followed by 2x2 max pooling, and two linear layers."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, kernel_size=5)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.conv1(x))
        x = self.pool(self.conv2(x))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def lenet300(num_classes: int = 10) -> LeNet300:
    """LeNet-300-100 for 28x28 images."""
    return LeNet300(num_classes)


def lenet5(num_classes: int = 10) -> LeNet5:
    """LeNet-5 for 28x28 images."""
    return LeNet5(num_classes)
