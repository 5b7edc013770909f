"""Will it fit? An answer in seconds that runs no operation of the model and takes no memory for it.

In: a model and the arguments of a step. Out: the peak of the step, with what kernels may take for themselves, beside
what is free here. It is the step with eager's bits, as derived: nothing is searched and nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.calls import check_call, check_optimizer
from undertow.free_memory import FreeMemory, find_free_memory
from undertow.ir import format_bytes
from undertow.ir.cost import Cost
from undertow.memory.destinations import assumed_workspace
from undertow.memory.tables import make_plan
from undertow.pipeline import Request, derive, expected_pattern, find_held, record
from undertow.runtime.held import THERE_BEFORE
from undertow.terms import CostSource, Terms


@dataclass(frozen=True)
class FitEstimate:
    """`peak_bytes` counts what kernels may take at most, `least_peak_bytes` nothing for them."""

    peak_bytes: int
    least_peak_bytes: int
    there_bytes: int  # of the peak, what is held already
    free: FreeMemory

    @property
    def fits(self) -> bool:
        """Whether what the step takes in addition is free."""
        return self.peak_bytes - self.there_bytes <= self.free.free_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "least_peak_bytes": self.least_peak_bytes,
            "there_bytes": self.there_bytes,
            "free_bytes": self.free.free_bytes,
            "limit_bytes": self.free.limit_bytes,
            "where": self.free.where,
        }

    def __str__(self) -> str:
        spread = f"{format_bytes(self.least_peak_bytes)} to {format_bytes(self.peak_bytes)}"
        verdict = "fits without a budget" if self.fits else "does not fit without a budget: try --budget auto"
        return (
            f"a step takes {spread}, by what its kernels take for themselves\n"
            f"of that {format_bytes(self.there_bytes)} are held already; {format_bytes(self.free.free_bytes)} of "
            f"{format_bytes(self.free.limit_bytes)} are free in {self.free.where}\n"
            f"{verdict}"
        )


def estimate_fit(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> FitEstimate:
    """Whether a step fits into what is free, without running it."""
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    request = Request(model, model.forward, Terms(optimizer=optimizer, costs=CostSource.MODEL))
    with torch.enable_grad():
        captured = record(request, args, kwargs or {})
    program = derive(request, captured.program, expected_pattern(request, captured))
    held = find_held(request, program)
    least, most = (
        make_plan(program, held=held, cost_of=lambda node, size=size: Cost(0, size(node)))  # type: ignore[misc]
        for size in (lambda node: 0, assumed_workspace)
    )
    device = next((item.value.tensor_type.device for item in program.inputs), None)
    there_bytes = sum(held.get(name, 0) for name in THERE_BEFORE)
    return FitEstimate(most.peak_bytes, least.peak_bytes, there_bytes, find_free_memory(device))
