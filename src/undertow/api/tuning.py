"""`tune`: measures the times for a model in advance, so that later plans need not measure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.alternatives.registry import find_alternatives
from undertow.api.calls import check_call
from undertow.api.terms import parse_numerics
from undertow.costs.table import find_costs
from undertow.ir import Operation
from undertow.ir.cost import signature
from undertow.pipeline import Request, derive, expected_pattern, record
from undertow.terms import Numerics, Terms


@dataclass(frozen=True)
class Tuning:
    """What was timed: distinct operations of the step and their alternatives, and those chosen in fast numerics."""

    num_operations: int
    fast_operations: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} ({count})" for name, count in sorted(self.fast_operations.items()))
        return f"{self.num_operations} operations timed on this machine\nchosen in fast numerics: {chosen or 'none'}"


def tune(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, numerics: str = "fast"
) -> Tuning:
    """Time the operations of a training step in exact numerics and in those given, and keep the times on disk."""
    check_call(model, args, kwargs)
    keys: set[str] = set()
    chosen: Counter[str] = Counter()
    exact: set[Operation] = set()
    for kind in dict.fromkeys((Numerics.EXACT, parse_numerics(numerics))):
        request = Request(model, model.forward, Terms(numerics=kind))
        with torch.enable_grad():
            captured = record(request, args, kwargs or {})
        program = derive(request, captured.program, expected_pattern(request, captured))
        nodes = [*program.nodes, *(alternative.node for alternative in find_alternatives(program))]
        find_costs(nodes, request.terms, captured.live)
        keys.update(signature(node) for node in nodes)
        if kind is Numerics.EXACT:
            exact = {node.operation for node in program.nodes}
        else:
            chosen.update(node.name for node in program.nodes if node.operation not in exact)
    return Tuning(len(keys), dict(chosen))
