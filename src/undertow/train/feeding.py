"""Batches in an order that depends on the seed and the epoch alone, from any batch on.

All draws made for batches (an order, an augmentation) come from generators that are seeded for the epoch. The
generators that the model draws from are left alone. So two numbers, epoch and batch, say where a run is in its data.
Workers only read and change examples; the order, and a seed for each example, come from the process that trains.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler

from undertow.data.augmentation import Augmented, Draw
from undertow.data.examples import Examples
from undertow.errors import DataError

MAX_DRAW_SEED = 2**63 - 1


@dataclass(frozen=True)
class Share:
    """Which batches of an epoch a worker computes: of every `num_workers` groups, one, until `num_groups` are taken."""

    worker: int = 0
    num_workers: int = 1
    group: int = 1
    num_groups: int | None = None  # of all workers

    def has(self, position: int) -> bool:
        """Whether the batch at this position, counted from where the epoch goes on, is the worker's."""
        number = position // self.group
        return number % self.num_workers == self.worker and (self.num_groups is None or number < self.num_groups)


ALL = Share()


class EpochOrder(Sampler[list[Any]]):
    """Batches of indices, or of draws, shuffled again in every epoch. The last batch is left out if incomplete.

    `epoch_seed` and `first` say which epoch, and from which batch on. The order follows from them alone, not from any
    process's generator, so workers may live on into the next epoch.
    """

    def __init__(self, num_examples: int, batch: int, is_drawing: bool) -> None:
        self.num_examples, self.batch, self.is_drawing = num_examples, batch, is_drawing
        self.first, self.epoch_seed, self.share = 0, 0, Share()

    def __len__(self) -> int:
        return self.num_examples // self.batch

    def __iter__(self) -> Iterator[list[Any]]:
        generator = torch.Generator().manual_seed(self.epoch_seed)
        # A DataLoader used to draw this number before the order was drawn, and runs begun then must go on.
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        order: list[Any] = torch.randperm(self.num_examples, generator=generator).tolist()
        if self.is_drawing:
            seeds = torch.randint(MAX_DRAW_SEED, (self.num_examples,), generator=generator).tolist()
            order = [Draw(*pair) for pair in zip(order, seeds, strict=True)]
        for index in range(self.first, len(self)):
            if self.share.has(index - self.first):
                yield order[index * self.batch : (index + 1) * self.batch]


class Loader(DataLoader[Any]):
    """Batches of Examples. What a worker could not read is raised here as it was, in one line."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return map(_raise_error, super().__iter__())

    def close(self) -> None:
        """End workers that wait for the next epoch."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None


def _raise_error(batch: Any) -> Any:
    if isinstance(batch, DataError):
        raise batch
    return batch


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(index: int) -> None:
    # A Ctrl-C or a SIGTERM for the whole group would end the worker before its parent has saved the run.
    os.setpgid(0, 0)


def _context(num_workers: int) -> str | None:
    """A forked worker shares the examples with its parent; a process that is started gets a copy of them."""
    return "fork" if num_workers else None


def make_train_loader(examples: Examples, batch: int, num_workers: int = 0, is_for_gpu: bool = False) -> Loader:
    """Batches to train on. Workers stay for the whole run: they have no state that a batch depends on.

    For a GPU they come in pinned memory: with workers a thread copies them there, while the loop goes on.
    """
    order = EpochOrder(len(examples), batch, isinstance(examples, Augmented))
    return Loader(
        examples,
        batch_sampler=order,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=_begin_worker,
        multiprocessing_context=_context(num_workers),
        persistent_workers=num_workers > 0,
        pin_memory=is_for_gpu,
    )


def make_test_loader(examples: Examples, batch: int, num_workers: int = 0) -> Loader:
    """Every example once, in order. Workers end with the last batch: two sets of them would hold memory for both."""
    return Loader(
        examples,
        batch_size=batch,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=_begin_worker,
        multiprocessing_context=_context(num_workers),
    )


class Feed:
    """The batches of a loader, epoch by epoch, from any batch on."""

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        self.loader, self.seed = loader, seed

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def batches(self, epoch: int, first: int, share: Share = ALL) -> Iterator[Any]:
        """The batches of an epoch from number `first` on, of which one worker computes its share."""
        states = _seed_states(self.seed, epoch)
        order = getattr(self.loader, "batch_sampler", None)
        num_skipped, read_share = first, share
        if isinstance(order, EpochOrder):
            order.first, order.share, num_skipped, read_share = first, share, 0, ALL
            order.epoch_seed = _derive_seed(self.seed, epoch)
        for owner in (self.loader, getattr(self.loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(_derive_seed(self.seed, epoch))
        if getattr(self.loader, "persistent_workers", False) and not isinstance(order, EpochOrder):
            # Workers would draw on from where the last epoch left them, and a resumed run has not seen that epoch.
            self.loader._iterator = None  # type: ignore[attr-defined]
        with _drawing_from(states):
            iterator = iter(self.loader)
            for _ in range(num_skipped):
                next(iterator, None)
        for position in count():
            with _drawing_from(states):
                batch = next(iterator, None)
            if batch is None:
                return
            if read_share.has(position):  # who does not read a batch draws what it draws all the same
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
