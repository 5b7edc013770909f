"""Solving a bare graph: what `undertow solve` does with a file of sizes, times and links.

In: an Instance, a share of its base peak, an order mode. Out: the fastest schedule found, its gap to a proved bound.
Several searches run at the same time, one per thread, each with a seed of its own. The fastest result counts, the first
of equals. A search ends after a number of moves, so the result does not depend on the machine unless time runs out.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from undertow.planner.bounds import lower_bound_peak, lower_bound_time
from undertow.planner.instance import MAXIMUM_TOTAL, Instance, replay
from undertow.planner.search import Solution, search

NUM_THREADS = 2
# How many searches: (for instances of at most so many kinds, seeds). Together they take 15 to 25 s on two cores.
SEEDS_BY_KINDS = ((150, 16), (600, 4), (2**62, 2))


@dataclass(frozen=True)
class SolvedGraph:
    """`extra_time_percent` is relative to the base order without recomputation; None where no schedule was found."""

    order: str
    budget_ratio: float
    extra_time_percent: float | None
    peak_ratio: float | None
    lower_bound_percent: float
    gap_percent: float | None
    lower_bound_peak_ratio: float
    seconds: float
    num_nodes: int
    outcome: str

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        if self.extra_time_percent is None:
            return (
                f"{self.order} order, {self.budget_ratio:.1%} of the base peak: {self.outcome}; "
                f"no schedule needs less than {self.lower_bound_peak_ratio:.1%} ({self.seconds:.1f} s)"
            )
        return (
            f"{self.order} order, {self.budget_ratio:.1%} of the base peak: {self.extra_time_percent:.3f} % extra time "
            f"at {self.peak_ratio:.1%}; bound {self.lower_bound_percent:.3f} %, gap {self.gap_percent:.3f} % "
            f"({self.outcome}, {self.seconds:.1f} s)"
        )


def solve_graph(
    instance: Instance, budget_ratio: float, *, is_fixed_order: bool, time_limit_s: float = 25.0
) -> SolvedGraph:
    """The fastest schedule found within `budget_ratio` of the base order's peak."""
    start_s = time.perf_counter()
    base = replay(instance, instance.order)
    # A budget above all values together is no limit.
    budget_bytes = int(min(base.peak_bytes * budget_ratio, MAXIMUM_TOTAL))
    least = lower_bound_peak(instance, is_fixed_order).amount
    bound, found = base.time, None
    if least <= budget_bytes:
        bound = lower_bound_time(instance, budget_bytes, is_fixed_order).amount
        found = _search(instance, budget_bytes, is_fixed_order, bound, start_s + time_limit_s)
    seconds = time.perf_counter() - start_s
    if found is None:
        outcome = "proved infeasible" if least > budget_bytes else "none found"
    elif found.time <= bound:
        outcome = "optimal"
    else:
        outcome = "timed out" if seconds >= time_limit_s else "feasible"
    return SolvedGraph(
        order="fixed" if is_fixed_order else "free",
        budget_ratio=budget_ratio,
        extra_time_percent=None if found is None else _percent_over(found.time, base.time),
        peak_ratio=None if found is None else found.peak_bytes / max(base.peak_bytes, 1),
        lower_bound_percent=_percent_over(bound, base.time),
        gap_percent=None if found is None else _percent_over(found.time, bound),
        lower_bound_peak_ratio=least / max(base.peak_bytes, 1),
        seconds=seconds,
        num_nodes=instance.num_kinds,
        outcome=outcome,
    )


def _percent_over(amount: int, base: int) -> float:
    """By how many percent `amount` is above `base`; 0 where both are 0, as in a graph whose nodes take no time."""
    return 100 * (amount - base) / max(base, 1)


def _search(
    instance: Instance, budget_bytes: int, is_fixed_order: bool, bound: int, deadline_s: float
) -> Solution | None:
    def run(seed: int) -> Solution | None:
        remaining_s = deadline_s - time.perf_counter()
        if remaining_s <= 0:
            return None
        return search(
            instance,
            budget_bytes,
            is_fixed_order=is_fixed_order,
            lower_bound_time=bound,
            seed=seed,
            time_limit_s=remaining_s,
        )

    num_seeds = next(count for kinds, count in SEEDS_BY_KINDS if instance.num_kinds <= kinds)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = [solution for solution in threads.map(run, range(num_seeds)) if solution is not None]
    return min(found, key=lambda solution: (solution.time, solution.peak_bytes), default=None)
