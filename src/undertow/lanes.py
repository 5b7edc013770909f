"""Time is lanes: when each of many activities starts and ends, where some of them take turns and some wait for others.

In: activities, each with the lane that it occupies, how long, and which others it waits for. Out: a `Timetable`: when
each starts and ends, when the last one ends, how long each lane is busy, and what each start waited for.

A lane does one thing at a time: the processor of a rank, a link, a stage of a pipeline. On most lanes activities run in
the order in which they are given, as in a program. On the lanes named in `by_urgency`, the most urgent of those that
wait goes next, as in an outbox. Nothing is interrupted: who wants that cuts an activity into several. An activity
without a lane only takes time, such as a latency or a delay before a beginning.

It is a simulation of events on a heap, O(n log n) in the number of activities and waits. Not modelled: links that
divide their speed among transfers, and lanes that slow each other down (two processes on one memory).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.errors import PlanError


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that occupies a lane. `after` are positions of activities that end before it starts.

    The least `urgency` goes first; it counts only on lanes that ask for it.
    """

    lane: Hashable | None
    duration_ns: int
    after: tuple[int, ...] = ()
    urgency: int = 0


@dataclass(frozen=True)
class Timetable:
    """When activities start and end; positions are those of the activities."""

    activities: tuple[Activity, ...]
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    held_up_by: tuple[int | None, ...]  # whose end each start waited for last; None at the beginning

    @cached_property
    def end_ns(self) -> int:
        """When the last activity ends."""
        return max(self.ends_ns, default=0)

    @cached_property
    def busy_ns(self) -> dict[Hashable, int]:
        """How long each lane is occupied."""
        busy: dict[Hashable, int] = {}
        for item in self.activities:
            if item.lane is not None:
                busy[item.lane] = busy.get(item.lane, 0) + item.duration_ns
        return busy

    def idle_share(self, lane: Hashable) -> float:
        """The share of the whole time in which a lane is not occupied."""
        return 1 - self.busy_ns.get(lane, 0) / self.end_ns if self.end_ns else 0.0

    @cached_property
    def critical_path_ns(self) -> int:
        """The longest row of activities of which each waits for the one before, whatever the lanes do meanwhile."""
        paths = [0] * len(self.activities)
        for position in self._in_order():
            item = self.activities[position]
            paths[position] = item.duration_ns + max((paths[before] for before in item.after), default=0)
        return max(paths, default=0)

    @property
    def bound_ns(self) -> int:
        """No order of the lanes takes less time than this: the longest lane, or the longest row of waits."""
        return max(self.critical_path_ns, max(self.busy_ns.values(), default=0))

    def critical_chain(self) -> tuple[int, ...]:
        """The activities that the end waited for, one after the other without a pause, from the beginning on."""
        if not self.activities:
            return ()
        position: int | None = max(range(len(self.activities)), key=lambda place: (self.ends_ns[place], -place))
        chain: list[int] = []
        while position is not None:
            chain.append(position)
            position = self.held_up_by[position]
        return tuple(reversed(chain))

    def _in_order(self) -> Iterator[int]:
        """All positions, each after those that it waits for."""
        num_waits = [len(item.after) for item in self.activities]
        followers = _find_followers(self.activities)
        ready = [position for position, number in enumerate(num_waits) if not number]
        while ready:
            position = ready.pop()
            yield position
            for follower in followers[position]:
                num_waits[follower] -= 1
                if not num_waits[follower]:
                    ready.append(follower)


def find_times(activities: Sequence[Activity], by_urgency: Collection[Hashable] = ()) -> Timetable:
    """The timetable, in which everything starts as early as its lane and its waits allow; raises PlanError.

    At every moment first all ends of that moment count, and then every free lane starts one activity.
    """
    return _Simulation(activities, frozenset(by_urgency)).run()


def _find_followers(activities: Sequence[Activity]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in activities]
    for position, item in enumerate(activities):
        for before in item.after:
            if not 0 <= before < len(activities):
                raise PlanError(f"activity {position} waits for activity {before}, and there are {len(activities)}")
            followers[before].append(position)
    return followers


class _Simulation:
    """What waits, what runs, and what time it is."""

    def __init__(self, activities: Sequence[Activity], by_urgency: frozenset[Hashable]) -> None:
        self.activities, self.by_urgency = tuple(activities), by_urgency
        self.followers = _find_followers(activities)
        self.num_waits = [len(item.after) for item in activities]
        self.starts = [-1] * len(activities)
        self.ends = [-1] * len(activities)
        self.held_up_by: list[int | None] = [None] * len(activities)
        self.orders: dict[
            Hashable, list[int]
        ] = {}  # what is still to run on lanes that have an order, the last one first
        for position in reversed(range(len(activities))):
            item = activities[position]
            if item.duration_ns < 0:
                raise PlanError(f"activity {position} takes {item.duration_ns} ns")
            if item.lane is not None and item.lane not in by_urgency:
                self.orders.setdefault(item.lane, []).append(position)
        self.waiting: dict[Hashable, list[tuple[int, int]]] = {lane: [] for lane in by_urgency}  # heaps
        self.last: dict[Hashable, int] = {}  # what a lane ran last, or runs
        self.busy: set[Hashable] = set()
        self.running: list[tuple[int, int]] = []  # a heap of ends

    def run(self) -> Timetable:
        lanes: dict[Hashable, None] = {}  # that may have something to start; a dict, because sets have no fixed order
        loose: list[int] = []  # without a lane
        for position, number in enumerate(self.num_waits):
            if not number:
                self._make_ready(position, lanes, loose)
        now_ns = 0
        while True:
            for position in loose:
                self._start(position, now_ns)
            for lane in lanes:
                chosen = None if lane in self.busy else self._choose(lane)
                if chosen is not None:
                    self._start(chosen, now_ns)
            if not self.running:
                break
            now_ns = self.running[0][0]
            lanes, loose = {}, []
            while self.running and self.running[0][0] == now_ns:
                self._end(heapq.heappop(self.running)[1], lanes, loose)
        self._check_all_ran()
        return Timetable(self.activities, tuple(self.starts), tuple(self.ends), tuple(self.held_up_by))

    def _make_ready(self, position: int, lanes: dict[Hashable, None], loose: list[int]) -> None:
        item = self.activities[position]
        if item.lane is None:
            loose.append(position)
            return
        if item.lane in self.by_urgency:
            heapq.heappush(self.waiting[item.lane], (item.urgency, position))
        lanes[item.lane] = None

    def _choose(self, lane: Hashable) -> int | None:
        if lane in self.by_urgency:
            return heapq.heappop(self.waiting[lane])[1] if self.waiting[lane] else None
        order = self.orders[lane]
        return order.pop() if order and not self.num_waits[order[-1]] else None

    def _start(self, position: int, now_ns: int) -> None:
        item = self.activities[position]
        self.starts[position], self.ends[position] = now_ns, now_ns + item.duration_ns
        before = [*item.after]
        if item.lane is not None:
            if item.lane in self.last:
                before.append(self.last[item.lane])
            self.last[item.lane] = position
            self.busy.add(item.lane)
        self.held_up_by[position] = max(before, key=self.ends.__getitem__, default=None)
        heapq.heappush(self.running, (self.ends[position], position))

    def _end(self, position: int, lanes: dict[Hashable, None], loose: list[int]) -> None:
        lane = self.activities[position].lane
        if lane is not None:
            self.busy.discard(lane)
            lanes[lane] = None
        for follower in self.followers[position]:
            self.num_waits[follower] -= 1
            if not self.num_waits[follower]:
                self._make_ready(follower, lanes, loose)

    def _check_all_ran(self) -> None:
        stuck = [position for position, start in enumerate(self.starts) if start < 0]
        if stuck:
            names = ", ".join(map(str, stuck[:5]))
            raise PlanError(f"activities {names}{', ...' if len(stuck) > 5 else ''} wait for each other in a circle")
