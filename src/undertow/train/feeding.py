"""Batches in an order that depends on the seed and the epoch alone, from any batch on.

All draws made for batches (an order, an augmentation) come from generators that are seeded for the epoch. The
generators that the model draws from are left alone. So two numbers, epoch and batch, say where a run is in its data.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class EpochOrder(Sampler[list[int]]):
    """Batches of indices, shuffled again in every epoch. The last batch is left out if it is incomplete."""

    def __init__(self, num_examples: int, batch: int) -> None:
        self.num_examples, self.batch = num_examples, batch
        self.first = 0

    def __len__(self) -> int:
        return self.num_examples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num_examples).tolist()
        for index in range(self.first, len(self)):
            yield order[index * self.batch : (index + 1) * self.batch]


def _unchanged(batch: Any) -> Any:
    return batch


def make_train_loader(examples: Dataset[Any], batch: int) -> DataLoader[Any]:
    """Batches to train on."""
    order = EpochOrder(len(examples), batch)  # type: ignore[arg-type]
    return DataLoader(examples, batch_sampler=order, collate_fn=_unchanged)


def make_test_loader(examples: Dataset[Any], batch: int) -> DataLoader[Any]:
    """Every example once, in order."""
    return DataLoader(examples, batch_size=batch, collate_fn=_unchanged)


class Feed:
    """The batches of a loader, epoch by epoch, from any batch on."""

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """The batches of an epoch from number `first` on."""
        states = _seed_states(self.seed, epoch)
        order = getattr(self.loader, "batch_sampler", None)
        num_skipped = first
        if isinstance(order, EpochOrder):
            order.first, num_skipped = first, 0
        for owner in (self.loader, getattr(self.loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(_derive_seed(self.seed, epoch))
        if getattr(self.loader, "persistent_workers", False):
            # Workers would draw on from where the last epoch left them, and a resumed run has not seen that epoch.
            self.loader._iterator = None  # type: ignore[attr-defined]
        with _drawing_from(states):
            iterator = iter(self.loader)
            for _ in range(num_skipped):
                next(iterator, None)
        while True:
            with _drawing_from(states):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch


def _derive_seed(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _seed_states(seed: int, epoch: int) -> list[Any]:
    """The states of torch's, numpy's and Python's generators at the start of an epoch."""
    number = _derive_seed(seed, epoch)
    return [
        torch.Generator().manual_seed(number).get_state(),
        numpy.random.RandomState(number).get_state(),
        random.Random(number).getstate(),
    ]


def _swap_states(states: list[Any]) -> list[Any]:
    before = [torch.get_rng_state(), numpy.random.get_state(), random.getstate()]
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
    return before


@contextmanager
def _drawing_from(states: list[Any]) -> Iterator[None]:
    """Draw from generators in these states while inside; the states are updated at the end."""
    outside = _swap_states(states)
    try:
        yield
    finally:
        states[:] = _swap_states(outside)
