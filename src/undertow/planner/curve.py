"""The time/memory curve of a step: the fastest schedule found at each of a row of budgets, from the least to the most.

In: an Instance. Out: points, each a schedule with its peak and time; among those that fit a budget the fastest is the
plan for it. A plan is thus the same whichever budget between two points is asked for, and a larger budget never gives a
slower step. Each level is searched from the order as written and from the schedule of the level below, which fits it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from undertow.planner.bounds import lower_bound_peak
from undertow.planner.instance import Instance, Int64s, replay
from undertow.planner.search import Solution, minimum_peak, search

NUM_LEVELS = 24
# Moves per level and kind: on GPT-2 (900 kinds, half of the way to the minimum) 100 give 1.2 % extra time, 1,000 give
# 1.0 %.
MOVES_PER_KIND = 250
FEWEST_MOVES, MOST_MOVES = 20_000, 1_500_000


@dataclass(frozen=True)
class Curve:
    """Points of rising peak and falling time; the first has the least peak that was found."""

    points: tuple[Solution, ...]
    lower_bound_peak_bytes: int
    is_complete: bool  # False when the time given ran out first

    def within(self, budget_bytes: int) -> list[Solution]:
        """The points whose peak fits, the fastest first."""
        return [point for point in reversed(self.points) if point.peak_bytes <= budget_bytes]


_KNOWN: OrderedDict[bytes, Curve] = OrderedDict()
MAX_KNOWN = 16  # the same step is often planned for one budget after another


def find_curve(instance: Instance, *, seed: int = 0, time_limit_s: float = math.inf) -> Curve:
    """The curve of an instance, in free order. Deterministic unless `time_limit_s` ends it early."""
    key = instance.digest()
    if key not in _KNOWN:
        curve = _find_curve(instance, seed, time_limit_s)
        if not curve.is_complete:
            return curve
        _KNOWN[key] = curve
        if len(_KNOWN) > MAX_KNOWN:
            _KNOWN.popitem(last=False)
    return _KNOWN[key]


def _find_curve(instance: Instance, seed: int, time_limit_s: float) -> Curve:
    deadline_s = time.perf_counter() + time_limit_s
    num_moves = min(max(MOVES_PER_KIND * instance.num_kinds, FEWEST_MOVES), MOST_MOVES)
    base = replay(instance, instance.order)
    points = [Solution(instance.order, base.time, base.peak_bytes, 0)]
    least = minimum_peak(instance, is_fixed_order=False, seed=seed, num_moves=num_moves, time_limit_s=time_limit_s)
    points.append(least)
    below: Int64s = least.schedule
    levels = np.linspace(least.peak_bytes, max(base.peak_bytes, least.peak_bytes), NUM_LEVELS).astype(np.int64)
    is_complete = True
    for level in [*levels.tolist(), 2**60]:
        remaining_s = deadline_s - time.perf_counter()
        if remaining_s <= 0:
            is_complete = False
            break
        for starts in ((), (below,)):
            found = search(
                instance,
                level,
                is_fixed_order=False,
                starts=starts,
                seed=seed,
                num_moves=num_moves // 2,
                time_limit_s=remaining_s,
            )
            if found is not None:
                points.append(found)
        fitting = [point for point in points if point.peak_bytes <= level]
        below = min(fitting, key=lambda point: (point.time, point.peak_bytes)).schedule
    return Curve(_undominated(points), lower_bound_peak(instance, False).amount, is_complete)


def _undominated(points: list[Solution]) -> tuple[Solution, ...]:
    """Those that no other point beats in peak and time, by rising peak."""
    kept: list[Solution] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.time)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return tuple(kept)
