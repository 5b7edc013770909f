"""`solve`: the planner on a bare graph of sizes, times and links, for comparing it with others on public instances."""

from __future__ import annotations

import math
from pathlib import Path

from undertow.api.calls import check_time_limit
from undertow.errors import CallError
from undertow.planner.graph_file import read_graph
from undertow.planner.solve import SolvedGraph, solve_graph


def solve(path: str | Path, peak: float, *, order: str = "free", time_limit_s: float = 25.0) -> SolvedGraph:
    """The fastest schedule found for the graph in `path` within `peak` (a share) of its base peak."""
    if order not in ("fixed", "free"):
        raise CallError(f'order must be "fixed" or "free", got {order!r}')
    if not (math.isfinite(peak) and peak > 0):
        raise CallError(f"peak must be a share of the base peak, such as 0.8, got {peak!r}")
    check_time_limit(time_limit_s)
    try:
        instance = read_graph(path)
    except ValueError as error:
        raise CallError(str(error)) from None
    return solve_graph(instance, peak, is_fixed_order=order == "fixed", time_limit_s=time_limit_s)
