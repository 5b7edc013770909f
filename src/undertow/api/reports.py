"""The report of a plan: the plan itself, the curve it lies on, and a measured step beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.calls import check_call, check_optimizer
from undertow.api.measuring import measure
from undertow.api.terms import parse_terms
from undertow.calls.planned import make_planned
from undertow.calls.smaller_batch import offering_smaller_batch
from undertow.doing import doing
from undertow.free_memory import find_free_memory
from undertow.ir import Plan
from undertow.pipeline import Request, expected_pattern, record, search_plan
from undertow.report.page import render_page
from undertow.report.plan_summary import plan_to_dict, print_plan
from undertow.runtime.held import THERE_BEFORE
from undertow.runtime.measure import Measurement
from undertow.terms import CostSource

CANNOT_SEE = (
    "the loss, where it is computed outside the planned module",
    "a second forward pass that is alive at the same time",
    "gradients that are there before the step: with accumulation they are held in addition",
)


@dataclass(frozen=True)
class PlanReport:
    """`curve` are (peak bytes, step microseconds) of the plans for other budgets."""

    plan: Plan
    curve: tuple[tuple[int, float], ...]
    measured: Measurement | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        measured = None if self.measured is None else vars(self.measured)
        return plan_to_dict(self.plan) | {"curve": [list(point) for point in self.curve], "measured": measured}

    def to_html(self, title: str) -> str:
        """One page that needs nothing else."""
        return render_page(
            self.plan,
            title=title,
            curve=self.curve,
            measured=self.measured,
            process_bytes=process_peak_bytes(),
            cannot_see=CANNOT_SEE,
        )

    def __str__(self) -> str:
        if self.measured is None:
            return print_plan(self.plan, CANNOT_SEE)
        measured = (
            f"measured: peak {self.measured.peak_bytes:,} bytes beside {self.plan.peak_bytes:,} predicted; "
            f"{self.measured.step_s * 1e3:.1f} ms, the median of several steps, beside "
            f"{self.plan.step_us / 1e3:.1f} predicted"
        )
        return print_plan(self.plan, CANNOT_SEE, (measured,))


def report_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    numerics: str = "exact",
    allow_other_bits: bool = False,
    costs: str = "measured",
    time_limit_s: float = math.inf,
) -> PlanReport:
    """Plan a step, and with measured costs run it, if there is room for it here; raises InfeasibleBudget."""
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    terms = parse_terms(
        model,
        budget=budget,
        optimizer=optimizer,
        costs=costs,
        time_limit_s=time_limit_s,
        numerics=numerics,
        allow_other_bits=allow_other_bits,
    )
    request = Request(model, model.forward, terms)
    with torch.enable_grad():
        captured = record(request, args, kwargs or {})
    with offering_smaller_batch(request, args, kwargs or {}):
        plan, planner = search_plan(request, captured, expected_pattern(request, captured))
    curve = tuple((point.peak_bytes, point.time / 1e3) for point in planner.curve.points)
    if terms.costs is CostSource.MODEL or plan.peak_bytes > _room_for(plan):
        return PlanReport(plan, curve, None)
    planned = make_planned(model, terms)
    with doing("running the step for its time and its peak"):
        measured = measure(planned, *args, **(kwargs or {}))
    return PlanReport(plan, curve, measured)


def _room_for(plan: Plan) -> int:
    """What the step may take at its peak, here and now: what is free, and what of it is there already."""
    device = next((item.value.tensor_type.device for item in plan.program.inputs), None)
    return find_free_memory(device).free_bytes + sum(plan.held.get(name, 0) for name in THERE_BEFORE)


def process_peak_bytes() -> int | None:
    """The most memory this process had resident so far; None where the system does not tell."""
    try:
        with open("/proc/self/status") as lines:
            found = next(line for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) << 10
