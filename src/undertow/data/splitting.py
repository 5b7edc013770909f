"""Parts of a source. In: examples. Out: some to train on, and some to choose the best weights by or to test on.

Where targets are classes, each class gives the same share to both parts. The choice follows from a seed alone.
"""

from __future__ import annotations

import hashlib

import torch

from undertow.data.examples import SPLIT_SEED, TEST_SHARE, Examples, Subset
from undertow.data.text import Stretches
from undertow.errors import DataError


def split_validation(examples: Examples, share: float, seed: int, what: str) -> tuple[Examples, Examples]:
    """Training and validation examples; of a text, its end is for validation."""
    num_validation = int(len(examples) * share + 0.5)
    num_classes = len(examples.targets.unique()) if has_labels(examples) else 1
    if num_validation < num_classes or num_validation == len(examples):
        enough = f"one for each of {num_classes} classes" if num_classes > 1 else "one"
        raise DataError(
            f"{what}: {share:g} of {len(examples):,} training examples are {num_validation:,} for validation; at least "
            f"{enough} is needed, and some to train on"
        )
    if isinstance(examples, Stretches):
        order = torch.arange(len(examples))
        chosen = order[len(examples) - num_validation :]
    else:
        chosen = choose_fairly(examples, num_validation, _derive_seed(seed))
    return _divide(examples, chosen)


def split_test(examples: Examples) -> tuple[Examples, Examples]:
    """Training and test examples, 80 to 20, the same every time."""
    return _divide(examples, choose_fairly(examples, int(len(examples) * TEST_SHARE), SPLIT_SEED))


def _divide(examples: Examples, chosen: torch.Tensor) -> tuple[Examples, Examples]:
    is_chosen = torch.zeros(len(examples), dtype=torch.bool)
    is_chosen[chosen] = True
    return Subset(examples, (~is_chosen).nonzero()[:, 0]), Subset(examples, is_chosen.nonzero()[:, 0])


def has_labels(examples: Examples) -> bool:
    """Whether each target is one class."""
    return examples.targets.dim() == 1 and not examples.targets.is_floating_point()


def choose_fairly(examples: Examples, num_chosen: int, seed: int) -> torch.Tensor:
    """The indices of so many examples: by class where targets are classes, otherwise any."""
    targets = examples.targets if has_labels(examples) else torch.zeros(len(examples), dtype=torch.int64)
    return choose_by_class(targets, num_chosen, seed)


def choose_by_class(targets: torch.Tensor, num_chosen: int, seed: int) -> torch.Tensor:
    """The indices of so many examples, from each class in proportion: by the method of largest remainders."""
    generator = torch.Generator().manual_seed(seed)
    classes, counts = targets.unique(return_counts=True)
    exact = counts.double() * num_chosen / max(len(targets), 1)
    quotas = exact.floor().long()
    # Remainders that are equal go to the classes that come first. A class keeps an example for the other part.
    order = (exact - quotas).argsort(descending=True, stable=True)
    order = order[(quotas + 1 < counts)[order]]
    quotas[order[: num_chosen - int(quotas.sum())]] += 1
    found = []
    for label, quota in zip(classes, quotas.tolist(), strict=True):
        members = (targets == label).nonzero()[:, 0]
        found.append(members[torch.randperm(len(members), generator=generator)[:quota]])
    return torch.cat(found).sort().values if found else torch.empty(0, dtype=torch.int64)


def _derive_seed(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} validation".encode()).digest()[:4], "big")
