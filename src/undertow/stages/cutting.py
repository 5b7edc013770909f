"""Where a model is cut into stages, by measured times, bytes and memory.

In: for each forward operation its time and that of its derivative, the values that later operations read, and what is
held for it. Out: the positions at which the stages begin. A stage is a stretch of the forward operations in the order
in which they were recorded.

A step of M shards through a pipeline whose slowest stage takes t takes about M t, and the time of one shard through all
stages. So first a cut is found whose slowest stage or link is fastest, by dynamic programming over all positions. Then
the stages' beginnings are moved one by one as long as a play of the schedule becomes shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from undertow.errors import CallError
from undertow.stages.schedules import Schedule
from undertow.stages.timing import StageTimes, Timing, time_schedule

# Between two processes of one machine: 100 MB took 55 ms (ranks/messages.py), and a message of no size 0.1 ms.
LINK_BYTES_PER_S = 1.8e9
MESSAGE_NS = 100_000
NEIGHBOURS = 40  # positions on either side to which a beginning is moved at once
NEIGHBOURS_OF_TWO = 6  # the same for two beginnings


class Flow(NamedTuple):
    """A value that later operations read: forward it is sent to them, and backward its cotangents come back."""

    maker: int
    readers: tuple[int, ...]  # in order
    forward_bytes: int
    backward_bytes: int


class Held(NamedTuple):
    """What is held throughout where one of these operations runs; `owned_bytes` where the first of them does."""

    readers: tuple[int, ...]
    bytes_everywhere: int
    owned_bytes: int


@dataclass(frozen=True)
class Profile:
    """What the search knows of a model. All lists are over forward operations."""

    names: Sequence[str]
    forward_ns: Sequence[int]
    backward_ns: Sequence[int]  # of what is derived from it, without the weights' half where that comes later
    weight_ns: Sequence[int]
    flows: Sequence[Flow] = ()
    held: Sequence[Held] = ()
    kept_bytes: Sequence[int] = ()  # what it makes for its derivative
    places: Sequence[int] = field(default=())  # where a stage may begin; everywhere by default

    @cached_property
    def total_ns(self) -> int:
        """One shard, computed in one process."""
        return sum(self.forward_ns) + sum(self.backward_ns) + sum(self.weight_ns)

    @cached_property
    def sums_ns(self) -> np.ndarray:
        """Times of the operations before each position, their derivatives included."""
        rows = np.array([self.forward_ns, self.backward_ns, self.weight_ns], dtype=np.int64).sum(axis=0)
        return np.concatenate([[0], np.cumsum(rows)])


@dataclass(frozen=True)
class Cut:
    """Where stages 1, 2, ... begin, and the play of the schedule that was foreseen."""

    starts: tuple[int, ...]
    timing: Timing
    stages: tuple[StageTimes, ...]

    def shares(self) -> list[float]:
        """Each stage's part of all computing."""
        times = [item.forward_ns + item.backward_ns + item.weight_ns for item in self.stages]
        return [time / max(1, sum(times)) for time in times]


def find_cut(
    profile: Profile, schedule: Schedule, fits: Callable[[Sequence[int]], bool] = lambda starts: True
) -> Cut | None:
    """The best cut that was found; None where none fits. `fits` says whether a cut keeps to the ranks' memory."""
    num_stages = schedule.num_stages
    places = list(profile.places or range(1, len(profile.names)))
    if len(places) < num_stages - 1:
        raise CallError(
            f"{num_stages} stages are more than the {len(places) + 1} operations that a stage can begin with; use "
            f"fewer stages"
        )
    seeds = [_balance(profile, places, num_stages), _spread_memory(profile, places, num_stages)]
    found = [_improve(profile, schedule, places, seed, fits) for seed in dict.fromkeys(seeds)]
    known = [cut for cut in found if cut is not None]
    return min(known, key=lambda cut: cut.timing.step_ns) if known else None


def judge(profile: Profile, schedule: Schedule, starts: Sequence[int]) -> Cut:
    """A cut with its times."""
    stages = tuple(stage_times(profile, starts))
    return Cut(tuple(starts), time_schedule(schedule, stages), stages)


def stage_times(profile: Profile, starts: Sequence[int]) -> list[StageTimes]:
    """What the stages of a cut take for one shard."""
    bounds = [0, *starts, len(profile.names)]
    stage_of = np.searchsorted(np.array(starts), np.arange(len(profile.names)), side="right")
    forward: list[dict[int, int]] = [{} for _ in bounds[1:]]
    backward: list[dict[int, int]] = [{} for _ in bounds[1:]]
    for flow in profile.flows:
        source = int(stage_of[flow.maker])
        targets = sorted({int(stage_of[reader]) for reader in flow.readers} - {source})
        for target in targets:
            if flow.forward_bytes:
                forward[target][source] = forward[target].get(source, 0) + link_ns(flow.forward_bytes)
        # Cotangents are summed on the way back, from the last reader to the one before it.
        for earlier, later in pairwise([source, *targets]):
            if flow.backward_bytes:
                backward[earlier][later] = backward[earlier].get(later, 0) + link_ns(flow.backward_bytes)
    return [
        StageTimes(
            sum(profile.forward_ns[first:end]),
            sum(profile.backward_ns[first:end]),
            sum(profile.weight_ns[first:end]),
            forward[stage],
            backward[stage],
        )
        for stage, (first, end) in enumerate(pairwise(bounds))
    ]


def link_ns(num_bytes: int) -> int:
    """What a message takes on the way."""
    return MESSAGE_NS + int(num_bytes / LINK_BYTES_PER_S * 1e9)


def held_bytes(profile: Profile, starts: Sequence[int], stage: int) -> int:
    """What a stage holds throughout."""
    bounds = [0, *starts, len(profile.names)]
    first, end = bounds[stage], bounds[stage + 1]
    total = 0
    for item in profile.held:
        if any(first <= reader < end for reader in item.readers):
            total += item.bytes_everywhere
            total += item.owned_bytes if first <= item.readers[0] < end else 0
    return total


def most_of_a_step(profile: Profile, cut: Cut) -> str:
    """What bounds a cut: the stage that takes most, its share, and its largest operation."""
    shares = cut.shares()
    stage = max(range(len(shares)), key=shares.__getitem__)
    bounds = [0, *cut.starts, len(profile.names)]
    place = max(range(bounds[stage], bounds[stage + 1]), key=lambda position: operation_ns(profile, position))
    return f"stage {stage} is {shares[stage]:.0%} of a step: {profile.names[place]}"


def operation_ns(profile: Profile, position: int) -> int:
    """An operation and its derivative."""
    return profile.forward_ns[position] + profile.backward_ns[position] + profile.weight_ns[position]


def _balance(profile: Profile, places: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The cut whose slowest stage or link is fastest; among equals the one that sends least."""
    link = np.array([_link_at(profile, place) for place in places], dtype=np.int64)
    return _least_of_the_most(profile.sums_ns, np.array(places), num_stages, link)


def _spread_memory(profile: Profile, places: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The cut whose fullest stage holds least, for models that hardly fit. Tied weights count where they come first."""
    sizes = np.array(profile.kept_bytes or [0] * len(profile.names), dtype=np.int64)
    for item in profile.held:
        sizes[item.readers[0]] += item.bytes_everywhere + item.owned_bytes
    return _least_of_the_most(np.concatenate([[0], np.cumsum(sizes)]), np.array(places), num_stages, None)


def _least_of_the_most(
    sums: np.ndarray, places: np.ndarray, num_stages: int, least: np.ndarray | None
) -> tuple[int, ...]:
    """Divide a row of numbers, given by their running sums, into stretches whose largest sum is least.

    `least` are numbers that beginning a stretch at a place costs at least.
    """
    count = len(places)
    ends = np.append(places, len(sums) - 1)
    # most[k][j]: with k stretches so far, the last of them ending at ends[j].
    most = sums[ends]
    choices: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        following = np.full(count + 1, np.iinfo(np.int64).max)
        choice = np.zeros(count + 1, dtype=np.int64)
        for place in range(1, count + 1):
            costs = np.maximum(most[:place], sums[ends[place]] - sums[ends[:place]])
            if least is not None:
                costs = np.maximum(costs, least[:place])
            choice[place] = int(np.argmin(costs))
            following[place] = costs[choice[place]]
        choices.append(choice)
        most = following
    starts: list[int] = []
    place = count
    for choice in reversed(choices):
        place = int(choice[place])
        starts.append(int(places[place]))
    return tuple(reversed(starts))


def _link_at(profile: Profile, place: int) -> int:
    """What crosses a place takes on its slower way."""
    crossing = [item for item in profile.flows if item.maker < place <= item.readers[-1]]
    there = sum(link_ns(item.forward_bytes) for item in crossing if item.forward_bytes)
    back = sum(link_ns(item.backward_bytes) for item in crossing if item.backward_bytes)
    return max(there, back)


def _improve(
    profile: Profile,
    schedule: Schedule,
    places: Sequence[int],
    starts: tuple[int, ...],
    fits: Callable[[Sequence[int]], bool],
) -> Cut | None:
    """Move the beginnings, each to the best place near it, as long as the step becomes shorter; then two at once."""
    numbers = {place: number for number, place in enumerate(places)}
    best = judge(profile, schedule, starts) if fits(starts) else None

    def try_all(candidates: Iterable[tuple[int, ...]]) -> bool:
        nonlocal best
        before = best
        for moved in candidates:
            if best is not None and _least_ns(profile, schedule, moved) >= best.timing.step_ns:
                continue
            if fits(moved) and (best is None or judge(profile, schedule, moved).timing.step_ns < best.timing.step_ns):
                best = judge(profile, schedule, moved)
        return best is not before

    def near(which: int, reach: int) -> list[int]:
        here = numbers[(starts if best is None else best.starts)[which]]
        return list(places[max(0, here - reach) : here + reach + 1])

    def moves(chosen: tuple[int, ...], reach: int) -> Iterator[tuple[int, ...]]:
        for values in itertools.product(*(near(which, reach) for which in chosen)):
            moved = list(starts if best is None else best.starts)
            for which, value in zip(chosen, values, strict=True):
                moved[which] = value
            if all(first < second for first, second in pairwise(moved)):
                yield tuple(moved)

    stages = range(len(starts))
    while True:
        if any(try_all(list(moves((which,), NEIGHBOURS))) for which in stages):
            continue
        if not any(try_all(list(moves(pair, NEIGHBOURS_OF_TWO))) for pair in itertools.combinations(stages, 2)):
            return best


def _least_ns(profile: Profile, schedule: Schedule, starts: Sequence[int]) -> int:
    """What a step takes at least: the busiest rank never waits, but for its first shard."""
    sums = profile.sums_ns
    loads = [0] * schedule.num_ranks
    for stage, (first, end) in enumerate(pairwise([0, *starts, len(profile.names)])):
        loads[schedule.rank_of(stage)] += int(sums[end] - sums[first])
    return schedule.num_shards * max(loads)
