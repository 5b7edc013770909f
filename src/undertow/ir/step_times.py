"""When the operations of a step run: the device that computes, and links beside it.

In: nodes in the order of a plan, and how long each takes. Out: when each starts and ends within a call, and how long
the call takes. Computing runs in the order of the plan. What is sent occupies its link from when it is started, the
most urgent first, and who reads it waits for it.

A node may wait for what a call before has left on its way. Then several calls are laid one after the other, and the
last of them counts: from the end of one call to the end of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from undertow.ir.operation import COMPUTING
from undertow.ir.program import Node
from undertow.ir.values import Value
from undertow.lanes import Activity, find_times

NUM_CALLS = 4  # until calls that wait for each other settle into a rhythm


@dataclass(frozen=True)
class StepTimes:
    """Times of the nodes of a call, from its beginning on. What is sent may end after the call."""

    lanes: tuple[str, ...]  # of each node
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    step_ns: int

    @cached_property
    def busy_ns(self) -> dict[str, int]:
        """How long each lane is occupied in a call; computing comes first."""
        busy = {COMPUTING: 0}
        for lane, start, end in zip(self.lanes, self.starts_ns, self.ends_ns, strict=True):
            busy[lane] = busy.get(lane, 0) + end - start
        return busy

    def idle_share(self, lane: str) -> float:
        """The share of a call in which a lane is not occupied."""
        return 1 - self.busy_ns[lane] / self.step_ns if self.step_ns else 0.0


@dataclass(frozen=True)
class Row:
    """A stretch of a step: computing without a pause, or something that is sent; and the rows that it waits for.

    What is joint begins when all ranks have come to it; what is not, an owner answers at any time.
    """

    lane: str
    duration_ns: int
    waits: tuple[int, ...]
    about: str
    is_joint: bool = True


def outline(nodes: Sequence[Node], durations_ns: Sequence[int]) -> list[Row]:
    """A step in few rows, for a picture or for several ranks together. What a call before left on its way is there."""
    rows: list[Row] = []
    row_of: dict[int, int] = {}
    for position, (node, waits) in enumerate(zip(nodes, _find_waits(nodes)[0], strict=True)):
        lane, duration_ns = node.operation.lane, durations_ns[position]
        found = tuple(row_of[other] for other in waits if other >= 0 and nodes[other].operation.lane != COMPUTING)
        if lane == COMPUTING and not found and rows and rows[-1].lane == COMPUTING:
            rows[-1] = replace(rows[-1], duration_ns=rows[-1].duration_ns + duration_ns)
            continue
        if lane != COMPUTING:
            found += tuple(row for row in (len(rows) - 1,) if row >= 0 and rows[row].lane == COMPUTING)
        row_of[position] = len(rows)
        is_joint = lane in node.operation.chains(node)  # one order on all ranks
        rows.append(Row(lane, duration_ns, found, str(node.origin) or node.name, is_joint))
    return rows


def find_step_times(nodes: Sequence[Node], durations_ns: Sequence[int]) -> StepTimes:
    """The times of a call of the step."""
    lanes = tuple(node.operation.lane for node in nodes)
    if set(lanes) <= {COMPUTING}:
        starts, now = [], 0
        for duration in durations_ns:
            starts.append(now)
            now += duration
        return StepTimes(lanes, tuple(starts), (*starts[1:], now) if starts else (), now)
    waits, is_carried = _find_waits(nodes)
    num_calls, number = NUM_CALLS if is_carried else 1, len(nodes)
    activities = [
        Activity(
            lanes[position],
            durations_ns[position],
            tuple(call * number + other for other in waits[position] if call * number + other >= 0),
            node.operation.urgency(node),
        )
        for call in range(num_calls)
        for position, node in enumerate(nodes)
    ]
    table = find_times(activities, {*lanes} - {COMPUTING})
    call_ends = [0]
    for call in range(num_calls):
        span = range(call * number, (call + 1) * number)
        call_ends.append(
            max((table.ends_ns[place] for place in span if activities[place].lane == COMPUTING), default=0)
        )
    start, last = call_ends[-2], (num_calls - 1) * number
    return StepTimes(
        lanes,
        tuple(time - start for time in table.starts_ns[last:]),
        tuple(time - start for time in table.ends_ns[last:]),
        call_ends[-1] - start,
    )


def _find_waits(nodes: Sequence[Node]) -> tuple[list[list[int]], bool]:
    """For each node the positions of nodes on other lanes that it waits for; negative ones are of the call before.

    Also whether there are any of these. What is computed waits for the computing before it by its lane.
    """
    announced: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for name in node.operation.announces(node):
            announced.setdefault(name, []).append(position)
    on_links: dict[Value, int] = {}
    waits: list[list[int]] = []
    is_carried = False
    last_computed = max((place for place, node in enumerate(nodes) if node.operation.lane == COMPUTING), default=0)
    last_computed -= len(nodes)  # of the call before
    for position, node in enumerate(nodes):
        found = {on_links[value] for value in node.inputs if value in on_links}
        for name in node.operation.awaits(node):
            earlier = [place for place in announced.get(name, ()) if place < position]
            found.update(earlier)
            if not earlier:
                found.update(place - len(nodes) for place in announced.get(name, ()))
                is_carried = is_carried or name in announced
        if node.operation.lane == COMPUTING:
            last_computed = position
        else:
            on_links.update(dict.fromkeys(node.named_outputs, position))
            found.add(last_computed)
        waits.append(sorted(found))
    return waits, is_carried
