"""Exhaustive search over the schedules of a tiny instance: the least time within a budget, or None.

Enumerates sequences depth first, bounded by length, and replays each complete one with the slow reference.
"""

from __future__ import annotations

from undertow.planner.instance import Instance, check_first_runs_in_order, replay


def every_schedule(instance: Instance, max_runs: int):
    """Every valid schedule of at most `max_runs` runs in which no run is useless at once."""
    targets = set(instance.targets.tolist())
    reads = [set(instance.reads.row(kind)) for kind in range(instance.num_kinds)]
    writes = [set(instance.writes.row(kind)) for kind in range(instance.num_kinds)]
    destroys = [set(instance.destroys.row(kind)) for kind in range(instance.num_kinds)]

    def extend(schedule: list[int], present: frozenset[int]):
        if targets <= present:
            yield list(schedule)
        if len(schedule) == max_runs:
            return
        for kind in range(instance.num_kinds):
            is_spent = not instance.can_repeat[kind] and kind in schedule
            is_repeat = bool(schedule) and schedule[-1] == kind
            if reads[kind] <= present and not is_spent and not is_repeat:
                schedule.append(kind)
                yield from extend(schedule, frozenset((present - destroys[kind]) | writes[kind]))
                schedule.pop()

    yield from extend([], frozenset(instance.initial.tolist()))


def frontier(instance: Instance, max_runs: int, is_fixed_order: bool) -> list[tuple[int, int]]:
    """(peak bytes, time) of every schedule not beaten in both, sorted by peak."""
    points = set()
    for schedule in every_schedule(instance, max_runs):
        if is_fixed_order:
            try:
                check_first_runs_in_order(instance, schedule)
            except ValueError:
                continue
        found = replay(instance, schedule)
        points.add((found.peak_bytes, found.time))
    kept: list[tuple[int, int]] = []
    for peak, time in sorted(points):
        if not kept or time < kept[-1][1]:
            kept.append((peak, time))
    return kept
