"""A Program with its memory and its times, moment by moment: the Plan of what runs.

In: a Program, what its operations cost, and what the step holds throughout. Out: a Plan. Only two things are decided
here: the offsets of values in the arena, and how much the arena may add to the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from undertow.ir import Plan, Program, Tables, Value
from undertow.ir.cost import Cost, signature
from undertow.ir.plan import ARENA_GAPS
from undertow.ir.program import Node
from undertow.memory.destinations import assumed_workspace, find_movable
from undertow.memory.lifetimes import Lifetimes, find_lifetimes, kept_values
from undertow.memory.placement import place
from undertow.memory.reuse import reuse_dead_inputs

NO_COST = Cost(0, 0)

ARENA_GAP_SHARE = 32  # the arena raises the peak by at most one part in so many; it usually needs less


def make_plan(
    program: Program,
    *,
    base: Program | None = None,
    bases: Sequence[tuple[int, ...]] | None = None,
    repeats: Mapping[Value, Value] | None = None,
    cost_of: Callable[[Node], Cost] | None = None,
    table: Mapping[str, Cost] | None = None,
    held: Mapping[str, int] | None = None,
    budget_bytes: int | None = None,
    **about: Any,
) -> Plan:
    """The Plan of a Program as it is; dead inputs are written over where that changes no bit.

    `held` are the bytes that are there throughout, the Program's inputs included (only these by default). The arena may
    have gaps as far as the budget allows. Without `cost_of`, it is laid out by the workspace that `table` has for some
    operations, and by a guess for the others.
    """
    costs = [cost_of(node) if cost_of is not None else NO_COST for node in program.nodes]
    workspaces = [[cost.workspace_bytes for cost in costs]]
    if cost_of is None:  # the arena has to fit whether kernels take memory for themselves or not
        guessed = (table.get(signature(node)) if table else None for node in program.nodes)
        workspaces.append(
            [
                assumed_workspace(node) if cost is None else cost.workspace_bytes
                for node, cost in zip(program.nodes, guessed, strict=True)
            ]
        )
    program, base = reuse_dead_inputs(program), base or program
    lifetimes = find_lifetimes(program)
    tables = _make_tables(program, lifetimes, costs)
    given = (*program.inputs, *program.unread)
    held = dict(held) if held is not None else {"inputs": sum(item.value.type.allocated_bytes for item in given)}
    live_bytes = _live_bytes(tables, program, lifetimes, sum(held.values()))
    peak_bytes = max(live_bytes, default=0)
    allowed_bytes = 0 if budget_bytes is None and cost_of is not None else peak_bytes // ARENA_GAP_SHARE
    if budget_bytes is not None:
        allowed_bytes = max(min(allowed_bytes, budget_bytes - peak_bytes), 0)
    offsets, gap_bytes = _place(program, lifetimes, tables, workspaces, allowed_bytes)
    if gap_bytes:
        held[ARENA_GAPS] = gap_bytes
    return Plan(
        program=program,
        base=base,
        bases=tuple(bases) if bases is not None else tuple((position,) for position in range(len(program.nodes))),
        repeats=dict(repeats or {}),
        tables=replace(tables, offsets=offsets),
        kept=kept_values(program, lifetimes),
        without_rule=tuple(node for node in program.nodes if node.operation.derivative_of is not None),
        held=held,
        live_bytes=tuple(size + gap_bytes for size in live_bytes),
        budget_bytes=budget_bytes,
        **about,
    )


def with_costs(plan: Plan, costs: Sequence[Cost]) -> Plan:
    """The same plan with costs that were not known when it was made: what runs, and where, stays as it is."""
    tables, lifetimes = plan.tables, find_lifetimes(plan.program)
    held = {name: size for name, size in plan.held.items() if name != ARENA_GAPS}
    tables = replace(
        tables,
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        duration_ns=tuple(cost.duration_ns for cost in costs),
    )
    inside = {root for root in lifetimes.born if tables.offsets[tables.storage[root]] is not None}
    live_bytes = _live_bytes(tables, plan.program, lifetimes, sum(held.values()))
    in_arena = _live_bytes(replace(tables, workspace_bytes=(0,) * len(costs)), plan.program, lifetimes, 0, inside)
    most_outside = max((live - placed for live, placed in zip(live_bytes, in_arena, strict=True)), default=0)
    gap_bytes = tables.arena_bytes + most_outside - max(live_bytes, default=0) if inside else 0
    if gap_bytes:
        held[ARENA_GAPS] = gap_bytes
    return replace(plan, tables=tables, held=held, live_bytes=tuple(size + gap_bytes for size in live_bytes))


def _make_tables(program: Program, lifetimes: Lifetimes, costs: Sequence[Cost]) -> Tables:
    numbers = {root: index for index, root in enumerate(lifetimes.born)}
    frees: list[list[int]] = [[] for _ in program.nodes]
    for root, index in numbers.items():
        if lifetimes.last_use[root] < len(program.nodes):
            frees[lifetimes.last_use[root]].append(index)
    return Tables(
        storage={value: numbers[root] for value, root in lifetimes.root.items()},
        storage_bytes=tuple(root.type.allocated_bytes for root in numbers),
        offsets=(None,) * len(numbers),
        frees=tuple(map(tuple, frees)),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        duration_ns=tuple(cost.duration_ns for cost in costs),
    )


def _place(
    program: Program,
    lifetimes: Lifetimes,
    tables: Tables,
    workspaces: Sequence[Sequence[int]],
    allowed_bytes: int,
) -> tuple[tuple[int | None, ...], int]:
    """Where storages lie in the arena, and by how much that raises the peak."""
    movable = find_movable(program, lifetimes)
    inputs = {item.value for item in program.inputs}
    last = len(program.nodes) - 1
    stretches = [
        None if root in inputs else (min(lifetimes.born[root], last), min(lifetimes.last_use[root], last))
        for root in lifetimes.born
    ]
    sizes = tables.storage_bytes
    return place(sizes, stretches, [root in movable for root in lifetimes.born], workspaces, allowed_bytes)


def _live_bytes(
    tables: Tables, program: Program, lifetimes: Lifetimes, held_bytes: int, counted: Collection[Value] | None = None
) -> list[int]:
    """What is held while each operation runs; of the step's values only those `counted`, if they are given."""
    change = [0] * (len(program.nodes) + 1)
    for root, born in lifetimes.born.items():
        if born >= 0 and (counted is None or root in counted):
            # Cotangents that nothing reads are given after the last operation, and are counted with it.
            change[max(min(born, len(program.nodes) - 1), 0)] += root.type.allocated_bytes
            if lifetimes.last_use[root] < len(program.nodes):
                change[lifetimes.last_use[root] + 1] -= root.type.allocated_bytes
    totals, alive = [], held_bytes
    for delta, workspace in zip(change, tables.workspace_bytes, strict=False):
        alive += delta
        totals.append(alive + workspace)
    return totals
