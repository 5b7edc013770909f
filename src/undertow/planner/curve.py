"""The time/memory curve of a step: the fastest schedule found at each of a row of budgets, from the most to the least.

In: an Instance. Out: points, each a schedule with its peak and time; the plan for a budget is the fastest point that
fits. So any budget between two points gives the same plan, and a larger budget never gives a slower step.

Each level is searched from the schedule of the level above, which nearly fits. On GPT-2 this takes a
third of the time of starting from the order as written and ends 8 % lower. Where a level is not reached, bisection
finds the least peak between it and the last level that was reached.

The levels that cost extra time are then searched once more from two schedules, their own and the one of the level
above, because on the way down a level inherits what the one above happened to find. This halves the extra time of
ResNet-50 and U-Net at a third of their memory.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from undertow.kernels.compiler import HAS_NUMBA
from undertow.planner.bounds import lower_bound_peak
from undertow.planner.instance import Instance, Int64s, replay
from undertow.planner.search import FROZEN, WARM, Solution, minimum_peak, search
from undertow.planner.stored_curves import load_points, store_points

NUM_LEVELS = 24
# Moves per level. On GPT-2 with 12 layers (1,048 kinds) 100,000 give 4 % more extra time than 250,000, averaged over
# the curve; small instances settle earlier, and in very large ones a move takes time in proportion to the schedule.
MOVES_PER_KIND, MOST_MOVES, MOVES_TIMES_KINDS = 500, 100_000, 300_000_000
# Instances of at most so many kinds have fewer moves on the way down, from two seeds, and more afterwards. Levels whose
# extra time is above a share of the step are searched again, and a level is added between two that differ by as much.
MOST_REFINED_KINDS, MOST_MOVES_BEFORE = 2_000, 20_000
COSTLY = 0.02
REFINING_MOVES_TIMES_KINDS, MOST_REFINING_MOVES = 1_600_000_000, 300_000  # of all levels together, and of one
REFINING_TEMPERATURE = 0.1
SETTLING_MOVES_PER_KIND = 30  # each formulation is tried several times
NUM_THREADS = 2
FEWER_MOVES = 1 if HAS_NUMBA else 200  # a move takes a microsecond compiled, and a few hundred in plain Python


@dataclass(frozen=True)
class Curve:
    """Points of rising peak and falling time; the first has the least peak that was found."""

    points: tuple[Solution, ...]
    lower_bound_peak_bytes: int
    is_complete: bool  # False when the time limit ended the search

    def within(self, budget_bytes: int) -> list[Solution]:
        """The points whose peak fits, the fastest first."""
        return [point for point in reversed(self.points) if point.peak_bytes <= budget_bytes]


_KNOWN: OrderedDict[bytes, Curve] = OrderedDict()
MAX_KNOWN = 16  # the same step is often planned for one budget after another
LEAST_STORED_S = 0.2  # a search that takes less is not worth a file


def find_curve(instance: Instance, *, seed: int = 0, time_limit_s: float = math.inf) -> Curve:
    """The curve of an instance, in free order. Deterministic unless `time_limit_s` ends it early."""
    key = instance.digest()
    if key not in _KNOWN:
        bound = lower_bound_peak(instance, False).amount
        points = load_points(instance)
        if points is None:
            start_s = time.perf_counter()
            points = _find_points(instance, bound, seed, start_s + time_limit_s)
            end_s = time.perf_counter()
            if end_s >= start_s + time_limit_s:
                return Curve(tuple(points), bound, is_complete=False)
            if end_s - start_s > LEAST_STORED_S:
                store_points(instance, points)
        _KNOWN[key] = Curve(tuple(points), bound, is_complete=True)
        if len(_KNOWN) > MAX_KNOWN:
            _KNOWN.popitem(last=False)
    return _KNOWN[key]


def _find_points(instance: Instance, bound: int, seed: int, deadline_s: float) -> list[Solution]:
    num_kinds = max(1, instance.num_kinds)
    is_refined = num_kinds <= MOST_REFINED_KINDS
    most_moves = MOST_MOVES_BEFORE if is_refined else MOST_MOVES
    num_moves = min(MOVES_PER_KIND * num_kinds, most_moves, MOVES_TIMES_KINDS // num_kinds) // FEWER_MOVES
    base = replay(instance, instance.order)
    points = [Solution(instance.order, base.time, base.peak_bytes, 0)]

    def descend(level: int, start: Solution) -> Solution | None:
        searches = [_Search(level, start.schedule, num_moves)] * (NUM_THREADS if is_refined else 1)
        points.extend(_search_all(instance, searches, WARM, seed, deadline_s))
        return min((point for point in points if point.peak_bytes <= level), key=_speed, default=None)

    above = points[0]
    too_low = bound - 1
    for level in [2**60, *np.linspace(base.peak_bytes, bound, NUM_LEVELS).astype(np.int64).tolist()]:
        reached = descend(level, above)
        if reached is None:
            too_low = level
            break
        above = reached
    least = minimum_peak(
        instance,
        min(points, key=lambda point: point.peak_bytes).schedule,
        too_low,
        is_fixed_order=False,
        seed=seed,
        num_moves=num_moves,
        time_limit_s=deadline_s - time.perf_counter(),
    )
    points.append(least)
    descend((least.peak_bytes + above.peak_bytes) // 2, above)
    descend(least.peak_bytes, least)
    if is_refined:
        searches = _refining_searches(undominated(points), REFINING_MOVES_TIMES_KINDS // num_kinds)
        points += _search_all(instance, searches, REFINING_TEMPERATURE, seed, deadline_s)
    settling = min(SETTLING_MOVES_PER_KIND * num_kinds, most_moves) // FEWER_MOVES
    searches = [_Search(point.peak_bytes, point.schedule, settling) for point in undominated(points)]
    points += _search_all(instance, searches, FROZEN, seed, deadline_s)
    return list(undominated(points))


@dataclass(frozen=True)
class _Search:
    """A search within a budget, from a schedule."""

    budget_bytes: int
    start: Int64s
    num_moves: int


def _search_all(
    instance: Instance, searches: Sequence[_Search], temperature: float, seed: int, deadline_s: float
) -> list[Solution]:
    """What the searches find, each with a seed of its own; as many run at the same time as there are threads."""

    def run(number: int) -> Solution | None:
        return search(
            instance,
            searches[number].budget_bytes,
            is_fixed_order=False,
            starts=(searches[number].start,),
            seed=seed + number,
            num_moves=searches[number].num_moves,
            given_temperature=temperature,
            time_limit_s=deadline_s - time.perf_counter(),
        )

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [found for found in threads.map(run, range(len(searches))) if found is not None]


def _refining_searches(points: Sequence[Solution], num_moves: int) -> list[_Search]:
    """Searches at costly points, and halfway to the next where the curve is steep; costlier ones get more moves."""
    extras = [point.time / max(1, points[-1].time) - 1 for point in points]
    wanted: list[tuple[int, Int64s, float]] = []
    for (point, extra), (above, extra_above) in pairwise(zip(points, extras, strict=True)):
        if extra > COSTLY:
            wanted += [(point.peak_bytes, start.schedule, extra) for start in (point, above)]
        if extra - extra_above > COSTLY:
            wanted.append(((point.peak_bytes + above.peak_bytes) // 2, above.schedule, extra))
    # Twice the extra time is not worth twice the moves.
    total = sum(math.sqrt(extra) for *_, extra in wanted)
    return [
        _Search(peak, start, min(MOST_REFINING_MOVES, int(num_moves * math.sqrt(extra) / total)) // FEWER_MOVES)
        for peak, start, extra in wanted
    ]


def _speed(point: Solution) -> tuple[int, int]:
    return (point.time, point.peak_bytes)


def undominated(points: list[Solution]) -> tuple[Solution, ...]:
    """The points that no other point beats in peak and time, by rising peak."""
    found: list[Solution] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.time)):
        if not found or point.time < found[-1].time:
            found.append(point)
    return tuple(found)
