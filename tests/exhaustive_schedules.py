"""Exhaustive search over the schedules of a tiny instance: the least time for every peak that can be reached.

Enumerates sequences depth first, bounded by length, and counts the bytes of each complete one backwards from its end:
a third way to the same numbers, which shares no code with the planner's replay or its search.
"""

from __future__ import annotations

from undertow.planner.instance import Instance


class Enumeration:
    """The schedules of one instance, with its rows as sets."""

    def __init__(self, instance: Instance, max_runs: int, is_fixed_order: bool) -> None:
        self.instance, self.max_runs = instance, max_runs
        self.reads, self.writes, self.destroys = (
            [set(row) for row in rows.lists()] for rows in (instance.reads, instance.writes, instance.destroys)
        )
        self.sizes, self.durations = instance.size_bytes.tolist(), instance.duration.tolist()
        self.workspaces, self.can_repeat = instance.workspace_bytes.tolist(), instance.can_repeat.tolist()
        self.reuse_reads, self.reuse_writes = instance.reuse_read.tolist(), instance.reuse_write.tolist()
        self.targets = set(instance.targets.tolist())
        self.place = {kind: place for place, kind in enumerate(instance.order.tolist())} if is_fixed_order else {}

    def every_schedule(self, schedule: list[int], present: set[int], latest: int):
        """Every valid schedule with this beginning in which no run is useless at once."""
        if self.targets <= present:
            yield schedule
        if len(schedule) == self.max_runs:
            return
        for kind, reads in enumerate(self.reads):
            is_first = kind not in schedule
            is_useless = bool(schedule) and schedule[-1] == kind
            if not reads <= present or is_useless or not (is_first or self.can_repeat[kind]):
                continue
            place = self.place.get(kind, latest) if is_first else latest
            if place >= latest:
                yield from self.every_schedule(
                    [*schedule, kind], (present - self.destroys[kind]) | self.writes[kind], place
                )

    def peak_bytes(self, schedule: list[int]) -> int:
        """From the end: what is held at a run is what it touches and what later runs still read."""
        needed = self.targets
        peak = 0
        for kind in reversed(schedule):
            reads, writes, reused = self.reads[kind], self.writes[kind], self.reuse_reads[kind]
            held = sum(self.sizes[value] for value in needed | reads | writes) + self.workspaces[kind]
            if reused in reads and (reused not in needed or reused in self.destroys[kind]):
                held -= min(self.sizes[reused], self.sizes[self.reuse_writes[kind]])
            peak = max(peak, held)
            needed = (needed - writes) | reads
        return peak + self.instance.fixed_bytes

    def time(self, schedule: list[int]) -> int:
        return sum(self.durations[kind] for kind in schedule)


def frontier(instance: Instance, max_runs: int, is_fixed_order: bool) -> list[tuple[int, int]]:
    """(peak bytes, time) of every schedule not beaten in both, sorted by peak."""
    every = Enumeration(instance, max_runs, is_fixed_order)
    schedules = every.every_schedule([], set(instance.initial.tolist()), -1)
    points = {(every.peak_bytes(schedule), every.time(schedule)) for schedule in schedules}
    kept: list[tuple[int, int]] = []
    for peak, time in sorted(points):
        if not kept or time < kept[-1][1]:
            kept.append((peak, time))
    return kept
