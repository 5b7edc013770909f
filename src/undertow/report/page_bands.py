"""Memory over a step as stacked bands. In: a Timeline. Out: Bands over at most `MAX_COLUMNS` moments.

A band is a value that is large enough to be seen, or all the small ones of one role together. So the picture of a
program of thousands of operations stays small. Of operations that share a column, the fullest is shown, so the peak is
always in the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from undertow.report.peak import WORKSPACE, LiveStorage, live_storage
from undertow.report.timeline import INPUT_ROLES, Life, Role, Timeline

MAX_COLUMNS = 800
MAX_VALUES = 120  # bands of one value each
MAX_MEMBERS = 2000  # small values that can be named
SMALLEST_SHARE = 1 / 250  # of the peak: less is about a pixel of the picture

# From the bottom up. Kept values are freed in the reverse of the order in which they are made: at the bottom they do
# not move while the others come and go.
STACK = (Role.KEPT, Role.OUTPUT, Role.CODE, Role.GRADIENT, Role.RECOMPUTED, Role.TEMPORARY)

# What lives long and adds up: its small values are split by the layers they come from.
SPLIT = (Role.KEPT, Role.CODE, Role.GRADIENT, Role.RECOMPUTED)
MAX_PARTS = 32
PART_SHARE = 1 / 32  # of the peak


@dataclass(frozen=True)
class Band:
    """`sizes` are bytes at each column; `members` are the values of a band that has no value of its own.

    `where` says from which layers they come. What `is_held` is there throughout the step.
    """

    label: str
    sizes: tuple[int, ...]
    value: LiveStorage | None = None
    where: str = ""
    is_held: bool = False
    members: tuple[LiveStorage, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Bands from the bottom up; `columns` are the positions of the operations shown."""

    columns: tuple[int, ...]
    boundary: int  # the first column of the backward pass
    bands: tuple[Band, ...]


def make_picture(timeline: Timeline) -> Picture:
    """The bands of a plan."""
    plan = timeline.plan
    columns = _choose_columns(plan.live_bytes, timeline.boundary)
    bands = [Band(name, (size,) * len(columns), is_held=True) for name, size in plan.held.items() if size]
    dynamic = [life for life in timeline.lives if timeline.roles[life.number] not in INPUT_ROLES.values()]
    smallest = plan.peak_bytes * SMALLEST_SHARE
    visible = [life for life in dynamic if life.num_bytes >= smallest]
    visible.sort(key=lambda life: (-life.num_bytes * life.num_nodes_alive, life.first, life.number))
    single = {life.number for life in visible[:MAX_VALUES]}
    others = sorted((life for life in dynamic if life.number not in single), key=lambda life: -life.num_bytes)
    named = {life.number for life in others[:MAX_MEMBERS]}
    for role in STACK:
        lives = [life for life in dynamic if timeline.roles[life.number] is role]
        small = [life for life in lives if life.number not in single]
        for part in _split(small, plan.peak_bytes) if role in SPLIT else [small]:
            if any(life.num_bytes for life in part):
                members = tuple(
                    live_storage(timeline, life) for life in part if life.number in named and life.num_bytes
                )
                sizes, where = _sum_sizes(part, columns, len(plan.nodes)), _name_layers(timeline, part)
                bands.append(Band(role.value, sizes, where=where, members=members))
        bands += [
            Band(role.value, _sum_sizes([life], columns, len(plan.nodes)), value=live_storage(timeline, life))
            for life in lives
            if life.number in single
        ]
    workspace = tuple(plan.tables.workspace_bytes[position] for position in columns)
    bands += [Band(WORKSPACE, workspace)] if any(workspace) else []
    boundary = sum(position < timeline.boundary for position in columns)
    return Picture(columns, boundary, tuple(bands))


def _split(lives: Sequence[Life], peak_bytes: int) -> Iterator[list[Life]]:
    """Values that were made one after the other, in parts that are large enough to be seen."""
    least = max(peak_bytes * PART_SHARE, sum(life.num_bytes for life in lives) / MAX_PARTS)
    part: list[Life] = []
    size = 0
    for life in sorted(lives, key=lambda life: (life.first, life.number)):
        part.append(life)
        size += life.num_bytes
        if size >= least:
            yield part
            part, size = [], 0
    yield part


def _name_layers(timeline: Timeline, lives: Sequence[Life]) -> str:
    """The first and the last layer that a band has values of, in the order of the step."""
    layers = dict.fromkeys(live_storage(timeline, life).made_by.layer or "(model)" for life in (lives[0], lives[-1]))
    return " to ".join(layers)


def _choose_columns(live_bytes: Sequence[int], boundary: int) -> tuple[int, ...]:
    """The fullest operation of each of at most `MAX_COLUMNS` stretches; none spans the two passes."""
    num_nodes = len(live_bytes)
    if num_nodes <= MAX_COLUMNS:
        return tuple(range(num_nodes))
    edges = {round(index * num_nodes / (MAX_COLUMNS - 1)) for index in range(MAX_COLUMNS)}
    ordered = sorted(edges | {boundary, num_nodes})
    return tuple(
        max(range(start, end), key=live_bytes.__getitem__)
        for start, end in zip(ordered, ordered[1:], strict=False)
        if start < end
    )


def _sum_sizes(lives: Sequence[Life], columns: Sequence[int], num_nodes: int) -> tuple[int, ...]:
    change = [0] * (num_nodes + 1)
    for life in lives:
        change[life.first] += life.num_bytes
        change[life.last + 1] -= life.num_bytes
    totals, alive = [], 0
    for delta in change:
        alive += delta
        totals.append(alive)
    return tuple(totals[position] for position in columns)
