"""`tune`: the table of measured times filled ahead, so that later plans of a model begin at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.alternatives.registry import find_alternatives
from undertow.api.budget_planning import Numerics, Terms, measured_costs, parse_numerics
from undertow.api.calls import check_call
from undertow.api.planning import derive
from undertow.api.precision import with_precision
from undertow.calls.planned import guess_pattern
from undertow.ir.cost import signature
from undertow.record.capture import capture


@dataclass(frozen=True)
class Tuning:
    """What was timed: distinct operations of the step and their alternatives, and those that ran in fast numerics."""

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
    fast: dict[str, int] = {}
    for kind in dict.fromkeys((Numerics.EXACT, parse_numerics(numerics))):
        terms = Terms(numerics=kind)
        forward = with_precision(kind, model, model.forward)
        with torch.enable_grad():
            captured = capture(forward, args, kwargs or {}, model)
        program = derive(captured.program, guess_pattern(captured), terms)
        nodes = [*program.nodes, *(alternative.node for alternative in find_alternatives(program))]
        measured_costs(terms, nodes)
        keys.update(signature(node) for node in nodes)
        if kind is not Numerics.EXACT:
            for node in program.nodes:
                if node.name.endswith((".fused", ".onednn")) or node.name.startswith(("convolution", "batch_norm")):
                    fast[node.name] = fast.get(node.name, 0) + 1
    return Tuning(len(keys), fast)
