"""Examples, the form that all data takes: a DataLoader fetches them by index, a batch at a time."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from undertow.data.preparation import Change, Preparation
from undertow.errors import DataError

TEST_SHARE = 0.2
SPLIT_SEED = 0
HASHED_BYTES = 64 << 20  # of an array; hashing them takes a tenth of a second

Batch = tuple[torch.Tensor, torch.Tensor]


class Examples(Dataset[Any]):
    """Inputs with targets. A DataLoader fetches a whole batch in one call and does not collate it again."""

    targets: torch.Tensor

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        """A batch of inputs and targets; `change` augments images."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that differs for other examples; of large data it covers a part."""

    def sample(self, indices: Sequence[int]) -> torch.Tensor:
        """Images divided by their scale and resized, not normalised: mean and deviation come from these."""
        raise NotImplementedError

    @abstractmethod
    def prepare_as(self, preparation: Preparation) -> None:
        """Prepare inputs in this way from now on."""

    def __getitems__(self, indices: Sequence[Any]) -> Batch | DataError:
        try:
            return self.fetch(indices)
        except DataError as error:
            if get_worker_info() is None:
                raise
            return error  # raised by a worker, it would be a traceback; `Loader` raises it

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.fetch([index])
        return inputs[0], targets[0]


class Arrays(Examples):
    """Examples in memory, prepared when they are fetched."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, preparation: Preparation) -> None:
        self.inputs, self.targets, self.preparation = inputs, targets, preparation

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        chosen = torch.as_tensor(indices)
        return self.preparation(self.inputs[chosen], change), self.preparation.cast(self.targets[chosen])

    def fingerprint(self) -> str:
        return hash_rows(self.inputs, self.targets)

    def sample(self, indices: Sequence[int]) -> torch.Tensor:
        return self.preparation.resize(self.inputs[torch.as_tensor(indices)].float() / self.preparation.scale)

    def prepare_as(self, preparation: Preparation) -> None:
        self.preparation = preparation


class Subset(Examples):
    """Some of other examples."""

    def __init__(self, whole: Examples, indices: torch.Tensor) -> None:
        self.whole, self.indices = whole, indices
        self.targets = whole.targets[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        return self.whole.fetch(self._find(indices), change)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.whole.fingerprint()} {hash_rows(self.indices)}".encode()).hexdigest()

    def sample(self, indices: Sequence[int]) -> torch.Tensor:
        return self.whole.sample(self._find(indices))

    def prepare_as(self, preparation: Preparation) -> None:
        self.whole.prepare_as(preparation)

    def _find(self, indices: Sequence[int]) -> list[int]:
        found: list[int] = self.indices[torch.as_tensor(indices)].tolist()
        return found


class Joined(Examples):
    """The examples of two, one after the other."""

    def __init__(self, first: Examples, second: Examples) -> None:
        self.first, self.second = first, second
        self.targets = torch.cat([first.targets, second.targets])

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        # One by one: a batch that lies in both parts is rare, and neither part is trained on.
        pairs = [
            self.first.fetch([index], change)
            if index < len(self.first)
            else self.second.fetch([index - len(self.first)], change)
            for index in indices
        ]
        return torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.first.fingerprint()} {self.second.fingerprint()}".encode()).hexdigest()

    def prepare_as(self, preparation: Preparation) -> None:
        self.first.prepare_as(preparation)
        self.second.prepare_as(preparation)


@dataclass(frozen=True)
class Source:
    """Training, validation and test examples, and how a new input is prepared in the same way.

    `validation` is None where there is no such part; `classes` names what the targets count, None where the data has no
    names. Pixels are normalised, other numbers are not. `size_note` says which size images get, where the first one
    decided.
    """

    train: Examples
    test: Examples
    preparation: Preparation
    classes: tuple[str, ...] | None
    validation: Examples | None = None
    has_pixels: bool = True
    size_note: str = ""


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
