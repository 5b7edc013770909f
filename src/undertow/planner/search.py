"""Finding fast schedules within a memory budget, and the smallest budget that can be met.

In: an `Instance`, a budget, an order mode, starting schedules. Out: `Solution`, replayed by the slow reference
before it is returned, or None when no schedule within the budget was found.

The search anneals (see `annealing`) from every starting schedule (the base order, when none is given), then once more
from the best found. It is deterministic: the work is counted in moves. Only a search that takes far longer than
expected is ended by `time_limit_s`, and its result then depends on the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from undertow.planner.annealing import BEST_RUNS, BEST_TIME, NUM_RECORDS, PRICE, WINDOW, anneal
from undertow.planner.instance import Instance, Int64s, check_first_runs_in_order, replay
from undertow.planner.sequence import current_schedule, make_sequence
from undertow.planner.state import MAXIMUM_STACK

# Temperatures in mean durations of a kind. On the public graphs one long cycle from hot beats many short ones; a search
# with few moves per kind cannot cool down from hot, and starts warm.
HOT, WARM, COLD = 10.0, 0.5, 0.02
FROZEN = 1e-6  # accepts only what saves time: an encoding that nothing needs may cost a thousandth of a mean duration
HOT_MOVES_PER_KIND = 40_000
# Moves of a whole search: enough for small instances to settle, fewer for large ones, where a move costs more.
MOVES_PER_KIND, MOVES_TIMES_KINDS_SQUARED = 40_000, 10**13
FEWEST_MOVES, MOST_MOVES = 800_000, 25_000_000
# Shares of these moves: a long cycle, one that starts over warm (better where few repetitions are needed), and a last
# one from the best schedule.
HOT_SHARE, WARM_SHARE, LAST_SHARE = 0.6, 0.2, 0.2
ANY_TIME = 2.0**62  # a goal that any schedule within the budget meets
PRECISION = 0.002  # of the least peak, in bytes per byte
CHUNKS_PER_CYCLE = 16  # between them the clock and the goal are checked
# Relative change of the price per window of moves; short searches take larger steps, so that the price can still rise
# by a factor of 10**4 (from "hardly matters" to "must fit") in an eighth of their windows.
LEAST_PRICE_STEP, MOST_PRICE_STEP, PRICE_RISE = 0.02, 0.5, 8 * math.log(1e4)


@dataclass(frozen=True)
class Solution:
    """A valid schedule with its time and peak by the reference replay."""

    schedule: Int64s
    time: int
    peak_bytes: int
    num_moves: int


class _Annealer:
    """One search at one budget: cycles share the best schedule and the price of excess."""

    def __init__(
        self, instance: Instance, budget_bytes: int, is_fixed_order: bool, seed: int, deadline_s: float
    ) -> None:
        self.instance = instance
        self.budget_bytes = budget_bytes
        self.is_fixed_order = is_fixed_order
        self.seed = seed
        self.deadline_s = deadline_s
        self.num_moves = 0
        self.mean_duration = max(float(instance.duration.mean()), 1e-3)
        self.record = np.full(NUM_RECORDS, np.inf)
        self.record[PRICE] = self.mean_duration / (100.0 * (float(instance.size_bytes.mean()) + 1.0))
        self.best: Int64s | None = None
        has_formulations = bool((np.diff(instance.writers().starts) > 1).any())
        self.weights = np.cumsum([35, 30, 35, 25] if is_fixed_order else [20, 20, 60, 25]).astype(np.int64)
        if not has_formulations:
            self.weights[3] = self.weights[2]

    def is_finished(self, goal_time: float) -> bool:
        return self.record[BEST_TIME] <= goal_time or time.perf_counter() > self.deadline_s

    def cycle(self, start: Int64s, num_moves: int, hot: float, goal_time: float) -> Int64s:
        """Anneal from a schedule; returns the schedule the cycle ended with."""
        state = make_sequence(self.instance, start, self.is_fixed_order, self.budget_bytes, self.seed + self.num_moves)
        kinds = np.zeros(state[MAXIMUM_STACK], np.int64)
        cold = min(COLD, hot)
        temperatures = self.mean_duration * hot * (cold / hot) ** (np.arange(CHUNKS_PER_CYCLE + 1) / CHUNKS_PER_CYCLE)
        before = self.record[BEST_TIME]
        price_step = min(MOST_PRICE_STEP, max(LEAST_PRICE_STEP, PRICE_RISE * WINDOW / num_moves))
        for chunk in range(CHUNKS_PER_CYCLE):
            num_chunk = max(1, num_moves // CHUNKS_PER_CYCLE)
            warm, cool = float(temperatures[chunk]), float(temperatures[chunk + 1])
            with np.errstate(over="ignore"):  # the random numbers wrap around; without Numba, NumPy reports it
                anneal(state, kinds, self.record, self.weights, num_chunk, warm, cool, price_step, goal_time)
            self.num_moves += num_chunk
            if self.is_finished(goal_time):
                break
        if self.record[BEST_TIME] < before:
            self.best = kinds[: int(self.record[BEST_RUNS])].copy()
        return self.best if self.best is not None else current_schedule(state)


def _solution(
    instance: Instance, schedule: Int64s, budget_bytes: int, is_fixed_order: bool, num_moves: int
) -> Solution:
    found = replay(instance, schedule)
    if is_fixed_order:
        check_first_runs_in_order(instance, schedule)
    if found.peak_bytes > budget_bytes:
        raise AssertionError(f"search: the replay needs {found.peak_bytes} bytes, the budget is {budget_bytes}")
    return Solution(schedule, found.time, found.peak_bytes, num_moves)


def default_moves(instance: Instance) -> int:
    """Moves of a whole search, by the size of the instance."""
    num_kinds = max(1, instance.num_kinds)
    return min(MOST_MOVES, MOVES_PER_KIND * num_kinds, max(FEWEST_MOVES, MOVES_TIMES_KINDS_SQUARED // num_kinds**2))


def search(
    instance: Instance,
    budget_bytes: int,
    *,
    is_fixed_order: bool,
    starts: Sequence[Int64s] = (),
    lower_bound_time: int = 0,
    seed: int = 0,
    num_moves: int | None = None,
    given_temperature: float = WARM,
    time_limit_s: float = math.inf,
) -> Solution | None:
    """The fastest schedule found whose peak fits the budget; `lower_bound_time` ends the search when it is reached.

    Given starts are warmed to `given_temperature`.
    """
    deadline_s = time.perf_counter() + time_limit_s
    num_moves = num_moves if num_moves is not None else default_moves(instance)
    annealer = _Annealer(instance, budget_bytes, is_fixed_order, seed, deadline_s)
    goal_time = float(lower_bound_time)
    hot = HOT * num_moves / (HOT_MOVES_PER_KIND * max(1, instance.num_kinds))
    hot = min(HOT, max(WARM, hot))
    # A given schedule is worth more than what a hot start would leave of it.
    given_share = (HOT_SHARE + WARM_SHARE) / max(1, len(starts))
    cycles = [(np.asarray(start, np.int64), given_share, given_temperature) for start in starts]
    for start, share, temperature in cycles or [(instance.order, HOT_SHARE, hot), (instance.order, WARM_SHARE, WARM)]:
        current = annealer.cycle(start, int(share * num_moves), temperature, goal_time)
        if annealer.is_finished(goal_time):
            break
    else:
        annealer.cycle(current, int(LAST_SHARE * num_moves), min(WARM, given_temperature), goal_time)
    if annealer.best is None:
        return None
    return _solution(instance, annealer.best, budget_bytes, is_fixed_order, annealer.num_moves)


def minimum_peak(
    instance: Instance,
    start: Int64s,
    too_low_bytes: int,
    *,
    is_fixed_order: bool,
    seed: int = 0,
    num_moves: int,
    time_limit_s: float = math.inf,
) -> Solution:
    """The schedule of the smallest peak found, by bisection between a budget that cannot be met and the best peak."""
    deadline_s = time.perf_counter() + time_limit_s
    best = _solution(instance, start, 2**62, is_fixed_order, 0)
    low = too_low_bytes
    total_moves = 0
    while best.peak_bytes - low > max(1, int(PRECISION * best.peak_bytes)) and time.perf_counter() < deadline_s:
        middle = (best.peak_bytes + low) // 2
        annealer = _Annealer(instance, middle, is_fixed_order, seed + total_moves, deadline_s)
        annealer.record[PRICE] *= 100.0  # time hardly matters here
        annealer.cycle(best.schedule, num_moves, WARM, ANY_TIME)
        total_moves += annealer.num_moves
        if annealer.best is None:
            low = middle
        else:
            best = _solution(instance, annealer.best, middle, is_fixed_order, total_moves)
    return best
