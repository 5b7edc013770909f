"""What each node of a step costs: measured on this machine, taken from the cache, or estimated.

In: nodes and terms. Out: a function from a node to its Cost. What is measured is added to the terms' table, and kept
on disk for the next process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from undertow.costs.cache import MAX_COSTS, cache_path, keep_costs, load_costs
from undertow.costs.links import find_link_speed
from undertow.costs.measuring import measure_costs, measure_workspaces, model_cost, unmeasured_cost
from undertow.ir import Node
from undertow.ir.cost import Cost, signature
from undertow.ir.operation import COMPUTING
from undertow.terms import CostSource, Terms

CostOf = Callable[[Node], Cost]


def find_costs(nodes: Sequence[Node], terms: Terms, live: Mapping[str, Any]) -> CostOf:
    """A function that gives the cost of these nodes; what `terms` ask to measure is measured now."""
    known = terms.table
    parts = {node: node.operation.parts(node, live) for node in nodes if node.operation.parts is not None}
    nodes = [*nodes, *(part for found in parts.values() for part in found.nodes)]
    if terms.costs is CostSource.MEASURED:
        _measure_unknown(nodes, known, live, is_apart=terms.budget_bytes is not None)
    guess_cost = unmeasured_cost if terms.costs is CostSource.MEASURED else model_cost
    found = {key: known[key] for node in nodes if (key := signature(node)) in known}
    for key in list(known)[:-MAX_COSTS]:
        del known[key]

    speed = find_link_speed(known)

    def cost_of(node: Node) -> Cost:
        if node.operation.costs_nothing:
            return Cost(0, 0)
        if node.operation.lane != COMPUTING:
            return Cost(speed.duration_ns(node.operation.sent_bytes(node)), 0)
        if node.operation.parts is not None:
            whole = parts[node] if node in parts else node.operation.parts(node, live)
            return whole.combine([cost_of(part) for part in whole.nodes])
        key = signature(node)
        if key not in found:
            found[key] = known[key] if key in known else guess_cost(node)
        return found[key]

    return cost_of


def find_workspaces(nodes: Sequence[Node], terms: Terms, live: Mapping[str, Any]) -> CostOf:
    """As `find_costs` with measured costs, without the times: those that nobody has measured are 0.

    Each kind of operation runs once, or twice on a GPU.
    """
    parts = {node: node.operation.parts(node, live) for node in nodes if node.operation.parts is not None}
    whole = [
        *(node for node in nodes if node not in parts),
        *(part for found in parts.values() for part in found.nodes),
    ]
    known = {key: terms.table[key].workspace_bytes for node in whole if (key := signature(node)) in terms.table}
    measure_workspaces(whole, known, live)

    def cost_of(node: Node) -> Cost:
        if node in parts:
            return parts[node].combine([cost_of(part) for part in parts[node].nodes])
        return Cost(0, 0 if node.operation.costs_nothing else known[signature(node)])

    return cost_of


def _measure_unknown(nodes: Sequence[Node], known: dict[str, Cost], live: Mapping[str, Any], *, is_apart: bool) -> None:
    """Add to `known` what the cache has of the nodes, and what has to be measured."""
    device = next((value.tensor_type.device for node in nodes for value in node.named_outputs), torch.device("cpu"))
    path = cache_path(device)
    cached = load_costs(path)
    given = dict(known)
    keys = {signature(node) for node in nodes}
    known.update({key: cached[key] for key in keys if key in cached and key not in given})
    # A given table may come from another machine. The cache of this machine gets only what was measured here.
    if measure_costs(nodes, known, live, _show_progress, is_apart=is_apart):
        known.update(keep_costs(path, {key: known[key] for key in known if key not in given and key not in cached}))


def _show_progress(items: list[Any]) -> Iterable[Any]:
    """Iterate over what is to be timed, with a bar on a terminal: the first plan on a machine takes longest."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "timing operations on this machine", console=Console(stderr=True), transient=True)
