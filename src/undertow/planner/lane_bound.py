"""A lower bound on the time of a step that sends: its busiest link, and its longest row of waits.

In: a Problem. Out: nanoseconds below which no schedule's time can lie, whatever the budget. `bounds.py` has the bound
of the lane that computes; the greatest of all holds.

*Link.* What is sent is sent once, and a link does one thing at a time. *Waits.* A value is not there before what it is
made from: ready(v) = min over the kinds k that write v of (duration of k + max over the values u that k reads of
ready(u)). A transfer adds its time on the link. What only has to come after it in a chain waits for its start.
"""

from __future__ import annotations

import math
from collections import Counter

from undertow.planner.problem import EFFECT, Problem


def bound_of_links(problem: Problem) -> int:
    """0 where nothing is sent."""
    if not problem.sent:
        return 0
    busy: Counter[str] = Counter()
    for link, duration_ns in problem.sent.values():
        busy[link] += duration_ns
    return max(*busy.values(), _longest_wait(problem))


def _longest_wait(problem: Problem) -> int:
    instance = problem.instance
    reads, writes, durations = instance.reads.lists(), instance.writes.lists(), instance.duration.tolist()
    for kind in problem.sent:  # their time on the link is added below
        durations[kind] = 0
    ready = [math.inf] * instance.num_values
    for value in instance.initial.tolist():
        ready[value] = 0
    is_effect = [name.startswith(EFFECT) for name in problem.storages]
    base = instance.order.tolist()
    order = [*base, *sorted(set(range(instance.num_kinds)) - set(base))]
    has_changed = True
    while has_changed:
        has_changed = False
        for kind in order:
            end = durations[kind] + max((ready[value] for value in reads[kind]), default=0)
            sent_ns = problem.sent[kind][1] if kind in problem.sent else 0
            for value in writes[kind]:
                found = end if is_effect[value] else end + sent_ns
                if found < ready[value]:
                    ready[value], has_changed = found, True
    return int(max((ready[value] for value in instance.targets.tolist()), default=0))
