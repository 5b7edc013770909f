"""What the planner decides about, as plain arrays, and the slow reference that replays a schedule.

In: sizes of values; for every kind of run its duration, workspace, and the values it reads, writes and destroys; a base
order. Out: `Instance`, and `replay`, which gives bytes per run, peak and time of a schedule or raises `ValueError`.

A *kind* is an operation, or one formulation of it. A *schedule* is a sequence of kinds; a kind may occur many times.
A value is alive from the run that writes it to its last read before it is written again, or to the end when it is a
target. A value that is written and never read afterwards is alive during that run only. The rules come from Checkmate
(Jain et al., MLSys 2020) and Moccasin (Bartan et al., ICML 2023), extended by formulations, destroyed inputs, workspace
and the reuse of a dying input's storage.

`replay` shares no code with the search, so that each finds the other's mistakes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
MAXIMUM_TOTAL = 2**59  # sums of sizes and of durations stay below this: the search adds 2**60 to mark empty positions


@dataclass(frozen=True)
class Rows:
    """Compressed sparse rows: row `i` is `items[starts[i]:starts[i + 1]]`."""

    starts: Int64s
    items: Int64s

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Rows:
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return Rows(starts, np.array([item for row in rows for item in row], np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> list[int]:
        return self.items[self.starts[index] : self.starts[index + 1]].tolist()

    def lists(self) -> list[list[int]]:
        starts, items = self.starts.tolist(), self.items.tolist()
        return [items[start:end] for start, end in pairwise(starts)]

    def owners(self) -> Int64s:
        """For every item, the number of its row."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


@dataclass(frozen=True)
class Instance:
    """One planning problem. Kinds and values are numbered from 0. A row of `destroys` is part of the row of `reads`."""

    size_bytes: Int64s
    duration: Int64s
    workspace_bytes: Int64s
    reads: Rows
    writes: Rows
    destroys: Rows
    can_repeat: NDArray[np.bool_]
    reuse_read: Int64s  # the value whose storage a run of the kind may take over when the value dies there, or -1
    reuse_write: Int64s  # the value written into that storage, or -1
    order: Int64s
    initial: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    targets: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    fixed_bytes: int = 0

    def __post_init__(self) -> None:
        check_instance(self)

    @property
    def num_kinds(self) -> int:
        return len(self.duration)

    @property
    def num_values(self) -> int:
        return len(self.size_bytes)

    def digest(self) -> bytes:
        """The same for instances that are the same in every number."""
        found = hashlib.sha256(str(self.fixed_bytes).encode())
        for name in self.__dataclass_fields__:
            item = getattr(self, name)
            for array in (item.starts, item.items) if isinstance(item, Rows) else (item,):
                part = np.asarray(array)
                found.update(f"{name} {part.shape} {part.dtype}".encode())
                found.update(part.tobytes())
        return found.digest()

    def writers(self) -> Rows:
        """For every value, the kinds that write it."""
        by_value = np.argsort(self.writes.items, kind="stable")
        counts = np.bincount(self.writes.items, minlength=self.num_values)
        return Rows(np.concatenate([[0], np.cumsum(counts)]), self.writes.owners()[by_value])

    def reuse_bytes(self) -> Int64s:
        """Bytes that count once, not twice, at a run whose reusable input dies there."""
        bonus = np.minimum(self.size_bytes[self.reuse_read], self.size_bytes[self.reuse_write])
        return np.where((self.reuse_read >= 0) & (self.reuse_write >= 0), bonus, 0).astype(np.int64)


def make_instance(
    size_bytes: Sequence[int],
    duration: Sequence[int],
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    *,
    workspace_bytes: Sequence[int] | None = None,
    destroys: Sequence[Sequence[int]] | None = None,
    can_repeat: Sequence[bool] | None = None,
    reuse: Sequence[tuple[int, int]] | None = None,
    order: Sequence[int] | None = None,
    initial: Sequence[int] = (),
    targets: Sequence[int] = (),
    fixed_bytes: int = 0,
) -> Instance:
    """An `Instance` from lists; what is left out is zero, repeatable, without reuse, in the order of the kinds."""
    num_kinds = len(duration)
    pairs = np.array(reuse if reuse is not None else [(-1, -1)] * num_kinds, np.int64).reshape(num_kinds, 2)
    return Instance(
        size_bytes=np.array(size_bytes, np.int64),
        duration=np.array(duration, np.int64),
        workspace_bytes=np.array(workspace_bytes if workspace_bytes is not None else [0] * num_kinds, np.int64),
        reads=Rows.of(reads),
        writes=Rows.of(writes),
        destroys=Rows.of(destroys if destroys is not None else [[] for _ in range(num_kinds)]),
        can_repeat=np.array(can_repeat if can_repeat is not None else [True] * num_kinds, np.bool_),
        reuse_read=pairs[:, 0].copy(),
        reuse_write=pairs[:, 1].copy(),
        order=np.array(order if order is not None else range(num_kinds), np.int64),
        initial=np.array(initial, np.int64),
        targets=np.array(targets, np.int64),
        fixed_bytes=int(fixed_bytes),
    )


def check_instance(instance: Instance) -> None:
    """Raise `ValueError` on arrays that do not fit together or on numbers too large for the search."""
    kinds, values = instance.num_kinds, instance.num_values
    for name in ("workspace_bytes", "can_repeat", "reuse_read", "reuse_write", "reads", "writes", "destroys"):
        if len(getattr(instance, name)) != kinds:
            raise ValueError(f"instance: {name} has {len(getattr(instance, name))} rows, there are {kinds} kinds")
    for name in ("size_bytes", "duration", "workspace_bytes"):
        numbers = getattr(instance, name)
        if len(numbers) and numbers.min() < 0:
            raise ValueError(f"instance: {name} must not be negative, found {numbers.min()}")
        if sum(numbers.tolist()) > MAXIMUM_TOTAL:
            raise ValueError(f"instance: {name} adds up to more than 2**59; choose a coarser unit")
    if not 0 <= instance.fixed_bytes <= MAXIMUM_TOTAL:
        raise ValueError(f"instance: fixed_bytes must lie between 0 and 2**59, found {instance.fixed_bytes}")
    for name in ("reads", "writes", "destroys"):
        items = getattr(instance, name).items
        if len(items) and not 0 <= items.min() <= items.max() < values:
            raise ValueError(f"instance: {name} names a value outside 0..{values - 1}")
    for kind in range(kinds):
        reads, writes = instance.reads.row(kind), instance.writes.row(kind)
        if len({*reads, *writes}) != len(reads) + len(writes):
            raise ValueError(f"instance: kind {kind} names a value twice; an update must write a new value")
        if not set(instance.destroys.row(kind)) <= set(reads):
            raise ValueError(f"instance: kind {kind} destroys a value that it does not read")
        pair = (int(instance.reuse_read[kind]), int(instance.reuse_write[kind]))
        if pair != (-1, -1) and not (pair[0] in reads and pair[1] in writes):
            raise ValueError(
                f"instance: kind {kind} reuses {pair}, which is not one of its reads and one of its writes"
            )
    for name, limit in (("order", kinds), ("initial", values), ("targets", values)):
        items = getattr(instance, name).tolist()
        if len(set(items)) != len(items) or any(not 0 <= item < limit for item in items):
            raise ValueError(f"instance: {name} has a number twice or outside 0..{limit - 1}")


@dataclass(frozen=True)
class Replay:
    """What a schedule costs."""

    run_bytes: Int64s
    peak_bytes: int
    time: int


def _lifetimes(instance: Instance, schedule: Sequence[int]) -> list[tuple[int, int, int]]:
    """(value, first run, last run) of every stretch in which a value is alive; raises when a read value is absent."""
    end = len(schedule)
    open_since: dict[int, int] = {int(value): 0 for value in instance.initial}
    last_use: dict[int, int] = {int(value): -1 for value in instance.initial}
    stretches: list[tuple[int, int, int]] = []
    runs_of = [0] * instance.num_kinds
    reads, writes, destroys = (rows.lists() for rows in (instance.reads, instance.writes, instance.destroys))
    for index, kind in enumerate(schedule):
        runs_of[kind] += 1
        if runs_of[kind] > 1 and not instance.can_repeat[kind]:
            raise ValueError(f"schedule: run {index} repeats kind {kind}, which may run once only")
        for value in reads[kind]:
            if value not in open_since:
                raise ValueError(f"schedule: run {index} of kind {kind} reads value {value}, which is not present")
            last_use[value] = index
        for value in destroys[kind]:
            stretches.append((value, open_since.pop(value), last_use.pop(value)))
        for value in writes[kind]:
            if value in open_since:
                stretches.append((value, open_since[value], last_use[value]))
            open_since[value] = last_use[value] = index
    for value in instance.targets.tolist():
        if value not in open_since:
            raise ValueError(f"schedule: target {value} is not present at the end")
        last_use[value] = end
    stretches.extend((value, since, last_use[value]) for value, since in open_since.items())
    return stretches


def replay(instance: Instance, schedule: Sequence[int] | Int64s) -> Replay:
    """Bytes at every run, their peak and the total time; raises `ValueError` when the schedule is not valid."""
    kinds = [int(kind) for kind in schedule]
    if any(not 0 <= kind < instance.num_kinds for kind in kinds):
        raise ValueError(f"schedule: a kind lies outside 0..{instance.num_kinds - 1}")
    sizes = instance.size_bytes.tolist()
    change = [0] * (len(kinds) + 2)
    dies_at: set[tuple[int, int]] = set()
    for value, first, last in _lifetimes(instance, kinds):
        if last >= first:
            change[first] += sizes[value]
            change[last + 1] -= sizes[value]
            dies_at.add((value, last))
    reused = instance.reuse_read[kinds].tolist()
    dies_here = np.array([(value, index) in dies_at for index, value in enumerate(reused)], np.bool_)
    bonus = np.where(dies_here, instance.reuse_bytes()[kinds], 0)
    alive = instance.fixed_bytes + np.cumsum(np.array(change[: len(kinds)], np.int64))
    run_bytes = alive + instance.workspace_bytes[kinds] - bonus
    peak_bytes = int(run_bytes.max()) if len(kinds) else instance.fixed_bytes
    return Replay(run_bytes, peak_bytes, int(instance.duration[kinds].sum()) if kinds else 0)


def check_first_runs_in_order(instance: Instance, schedule: Sequence[int] | Int64s) -> None:
    """Raise `ValueError` unless the first runs of the base kinds keep the base order."""
    base_index = {int(kind): index for index, kind in enumerate(instance.order)}
    seen: set[int] = set()
    latest = -1
    for run, kind in enumerate(int(kind) for kind in schedule):
        if kind in seen or kind not in base_index:
            continue
        seen.add(kind)
        if base_index[kind] < latest:
            raise ValueError(f"schedule: run {run} is the first of kind {kind}, too late for the base order")
        latest = base_index[kind]
