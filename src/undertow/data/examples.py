"""Examples, the form that all data takes: a DataLoader fetches them by index, a batch at a time."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from undertow.data.preparation import Preparation
from undertow.errors import DataError

TEST_SHARE = 0.2
SPLIT_SEED = 0
HASHED_BYTES = 64 << 20  # of an array; hashing them takes a tenth of a second


class Examples(Dataset[Any]):
    """Inputs with targets. A DataLoader fetches a whole batch in one call and does not collate it again."""

    targets: torch.Tensor

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that differs for other examples; of large data it covers a part."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]


class Arrays(Examples):
    """Examples in memory, prepared when they are fetched."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, preparation: Preparation) -> None:
        self.inputs, self.targets, self.preparation = inputs, targets, preparation

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices)
        return self.preparation(self.inputs[chosen]), self.preparation.cast(self.targets[chosen])

    def fingerprint(self) -> str:
        return hash_rows(self.inputs, self.targets)


@dataclass(frozen=True)
class Source:
    """Training and test examples, and how a new input is prepared in the same way.

    `classes` names what the targets count; None where the data has no names.
    """

    train: Examples
    test: Examples
    preparation: Preparation
    classes: tuple[str, ...] | None


def split_fixed(num_examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of training and test examples, 80 to 20, the same every time."""
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(SPLIT_SEED))
    num_test = int(num_examples * TEST_SHARE)
    return order[num_test:], order[:num_test]


def hash_rows(*arrays: torch.Tensor) -> str:
    """The sha256 of types, shapes and elements. A large array is hashed in part: rows at equal distances."""
    digest = hashlib.sha256()
    for array in arrays:
        distance = max(-(-array.nbytes // HASHED_BYTES), 1)
        digest.update(f"{array.dtype} {list(array.shape)}\n".encode())
        digest.update(array[::distance].contiguous().numpy().data)
    return digest.hexdigest()


def check_pair(what: str, num_inputs: int, num_targets: int) -> None:
    """Raise DataError unless there are inputs and each has its target."""
    if num_inputs != num_targets:
        raise DataError(f"{what} has {num_inputs:,} inputs and {num_targets:,} targets; each input needs one target")
    if num_inputs == 0:
        raise DataError(f"{what} has no examples")
