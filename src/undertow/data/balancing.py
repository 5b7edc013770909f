"""Class weights. In: training examples. Out: a weight for each class, so that rare classes count as much as others.

The weight of a class is n / (k * n_c), of n examples in k classes, n_c of them in this one (King & Zeng, "Logistic
regression in rare events data", 2001); the mean weight of an example is 1.
"""

from __future__ import annotations

import torch

from undertow.data.examples import Examples
from undertow.errors import DataError


def balance(examples: Examples, num_classes: int | None) -> torch.Tensor:
    """A weight for each class; without a number of classes, the largest label says it."""
    targets = examples.targets.flatten()
    if targets.is_floating_point() or not len(targets):
        raise DataError("--class-weights balanced: the targets are numbers, not classes")
    if targets.min() < 0:
        raise DataError(f"--class-weights balanced: the label {int(targets.min())} is no class")
    counts = targets.bincount(minlength=num_classes or 0)
    if (counts == 0).any():
        missing = int((counts == 0).nonzero()[0])
        raise DataError(
            f"--class-weights balanced: class {missing} has no training example, so its weight would be infinite; give "
            f"one number per class instead"
        )
    return (len(targets) / (len(counts) * counts.double())).float()
