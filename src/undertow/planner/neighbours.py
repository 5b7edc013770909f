"""A plan for a new shape from the curve of a near one, without a search.

In: a step that has the operations of one that was searched before, with other sizes. Out: a Planner whose curve has the
schedules of the other one, each replayed with the new sizes.

A schedule says what runs when, and names no size. Where two instances read, write and destroy the same values, a
schedule of one is a schedule of the other; only its peak and its time differ, and the replay gives both. Workspace is
measured for the new sizes, which is quick, so that the budget holds to the byte as it does after a search. Times are
those of the near step, times the ratio of what the model of costs says of both: they only choose between schedules.

What such a plan does not promise: that no searched plan would be faster. Its gap to the proved bound is stated, as for
any other plan. Where no schedule fits the budget, the step is searched, so a refusal always states the least found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from undertow.alternatives.registry import Alternative
from undertow.costs.measuring import measure_workspaces, model_cost
from undertow.ir import Node, Program
from undertow.ir.cost import Cost, signature
from undertow.planner.curve import Curve, undominated
from undertow.planner.instance import Instance, replay
from undertow.planner.plan import Planner
from undertow.planner.problem import make_problem
from undertow.planner.search import Solution

MAX_RATIO = 2.0  # of the bytes of all values; beyond, schedules of the other step fit less well
MAX_NEIGHBOURS = 16


@dataclass(frozen=True, eq=False)
class _Searched:
    """A step that was searched, with the nodes that its kinds stand for."""

    nodes: tuple[Node, ...]
    planner: Planner


@dataclass(eq=False)
class Neighbours:
    """The steps of one model that were searched so far, the latest last."""

    _searched: list[_Searched] = field(default_factory=list)
    _workspaces: dict[str, int] = field(default_factory=dict)  # measured for steps that were not searched

    @property
    def is_empty(self) -> bool:
        """Whether nothing was searched yet."""
        return not self._searched

    def add(self, nodes: Sequence[Node], planner: Planner) -> None:
        """Remember a searched step; `nodes` are the Program's and those of its alternatives."""
        self._searched = [*self._searched, _Searched(tuple(nodes), planner)][-MAX_NEIGHBOURS:]

    def find_planner(
        self,
        program: Program,
        alternatives: Sequence[Alternative],
        table: Mapping[str, Cost],
        held: Mapping[str, int],
        live: Mapping[str, Any],
    ) -> Planner | None:
        """The planner of a step by the nearest one that was searched; None where none is near."""
        nodes = (*program.nodes, *(item.node for item in alternatives))
        num_bytes = _made_bytes(nodes)
        alike = [item for item in self._searched if _are_alike(item.nodes, nodes)]
        for near in sorted(alike, key=lambda item: abs(_made_bytes(item.nodes) - num_bytes)):
            ratio = (_made_bytes(near.nodes) + 1) / (num_bytes + 1)
            if not 1 / MAX_RATIO <= ratio <= MAX_RATIO:
                return None
            cost_of = self._costs_from(near, nodes, table, live)
            problem = make_problem(program, alternatives, cost_of, sum(held.values()))
            if not _have_one_structure(near.planner.problem.instance, problem.instance):
                continue
            points = [_replayed(problem.instance, point) for point in near.planner.curve.points]
            curve = Curve(undominated(points), 0, is_complete=near.planner.curve.is_complete)
            return Planner(problem, curve, cost_of, held, near.planner.has_measured_costs)
        return None

    def _costs_from(
        self, near: _Searched, nodes: Sequence[Node], table: Mapping[str, Cost], live: Mapping[str, Any]
    ) -> Callable[[Node], Cost]:
        """Costs that were measured, else the workspace measured now and the time scaled from the near step."""
        keys = {node: signature(node) for node in nodes}  # a text of some size: made once for each
        unknown = [node for node in nodes if node.operation.parts is None and keys[node] not in table]
        if near.planner.has_measured_costs:
            measure_workspaces(unknown, self._workspaces, live)
        twins = dict(zip(nodes, near.nodes, strict=True))
        found: dict[str, Cost] = {}

        def cost_of(node: Node) -> Cost:
            if node.operation.costs_nothing:
                return Cost(0, 0)
            if node.operation.parts is not None:
                whole = node.operation.parts(node, live)
                return whole.combine([cost_of(part) for part in whole.nodes])
            key = keys.get(node) or signature(node)
            if key in table:
                return table[key]
            if not near.planner.has_measured_costs:
                return model_cost(node)
            if key not in found:
                found[key] = _scaled(node, twins.get(node), near.planner.cost_of, self._workspaces[key])
            return found[key]

        return cost_of


def _scaled(node: Node, twin: Node | None, cost_of: Callable[[Node], Cost], workspace_bytes: int) -> Cost:
    expected = model_cost(node).duration_ns
    if twin is None:
        return Cost(expected, workspace_bytes)
    return Cost(cost_of(twin).duration_ns * expected // max(1, model_cost(twin).duration_ns), workspace_bytes)


def _made_bytes(nodes: Sequence[Node]) -> int:
    return sum(value.type.allocated_bytes for node in nodes for value in node.named_outputs)


def _are_alike(left: Sequence[Node], right: Sequence[Node]) -> bool:
    """Whether the same operations run in the same order."""
    return len(left) == len(right) and all(a.operation is b.operation for a, b in zip(left, right, strict=True))


def _have_one_structure(left: Instance, right: Instance) -> bool:
    """Whether a schedule of one is a schedule of the other: all but sizes, times and workspaces is equal."""
    rows = ("reads", "writes", "destroys")
    pairs = [(getattr(left, name).starts, getattr(right, name).starts) for name in rows]
    pairs += [(getattr(left, name).items, getattr(right, name).items) for name in rows]
    names = ("can_repeat", "reuse_read", "reuse_write", "order", "initial", "targets")
    pairs += [(getattr(left, name), getattr(right, name)) for name in names]
    return left.num_values == right.num_values and all(np.array_equal(a, b) for a, b in pairs)


def _replayed(instance: Instance, point: Solution) -> Solution:
    found = replay(instance, point.schedule)
    return Solution(point.schedule, found.time, found.peak_bytes, 0)
