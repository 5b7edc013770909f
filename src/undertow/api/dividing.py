"""Which buckets of parameters are held whole on every rank, and which are divided and gathered when they are read.

In: a step whose optimizer's state is divided, and a budget. Out: the choice with which the plan is fastest, of those
that fit. Where all fits whole and nothing has to run again, all is held. Otherwise plans with more and more divided
buckets are compared: memory that dividing frees is memory that nothing has to be computed again for, and the link's
time is its price. Rank 0 chooses, since a bucket is divided on all ranks or on none.

All ranks plan each choice that is tried, since their parts are not quite equal: it has to fit on all of them.

Buckets are divided in one order, so that a choice is a number: first those whose gradients come last. Their layers are
read first and last in a step, far from the peak between the passes. None, all, half of them and the numbers halfway
from the best of these to its neighbours are tried, each with a whole search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from undertow.errors import InfeasibleBudget
from undertow.ir import Plan, Task
from undertow.ops.own_parts import OwnParts


def choose_divided(own: OwnParts, attempt: Callable[[Sequence[int]], Attempt]) -> list[int] | None:
    """The buckets to divide; None where nothing fits. `attempt` plans with some divided, on all ranks."""
    first = attempt(())
    if first.fits and not first.runs_again:
        return []
    order = [bucket for bucket in sorted(own.pieces, reverse=True) if own.divisible_bytes(bucket)]
    found = {0: first.step_us}
    for number in {len(order), len(order) // 2} - {0}:
        found[number] = attempt(order[:number]).step_us
    for number in _neighbours(found):
        found[number] = attempt(order[:number]).step_us
    best = min(found, key=lambda number: (found[number], number))
    return order[:best] if found[best] < math.inf else None


@dataclass(frozen=True)
class Attempt:
    """What came of planning with some buckets divided: the time of a step, infinite where it does not fit."""

    step_us: float
    runs_again: bool = False

    @property
    def fits(self) -> bool:
        """Whether all ranks have a plan."""
        return self.step_us < math.inf


def attempt_here(plan: Callable[[], Sequence[Plan]]) -> Attempt:
    """What comes of planning on this rank; `plan` gives the plans of its shards."""
    try:
        plans = plan()
    except InfeasibleBudget:
        return Attempt(math.inf)
    return Attempt(sum(item.step_us for item in plans), any(map(_runs_again, plans)))


def _runs_again(plan: Plan) -> bool:
    return any(node.task is not Task.FIRST and not node.operation.is_view for node in plan.nodes)


def _neighbours(found: Mapping[int, float]) -> list[int]:
    """The numbers halfway from the best so far to those on its sides."""
    numbers = sorted(found)
    place = numbers.index(min(found, key=found.__getitem__))
    halves = [(numbers[place] + other) // 2 for other in numbers[max(place - 1, 0) : place + 2]]
    return [number for number in dict.fromkeys(halves) if number not in found]
