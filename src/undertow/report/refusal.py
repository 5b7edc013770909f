"""The refusal of a budget that cannot be met: the least that fits, what takes the room, and the ways out.

In: the planner of the step and, where there is one, the planner of the step by kernels of least workspace. Out: the
error; its text for a terminal, its plain data, and its page. What it says would fit does: each way is a plan, or the
least plan replayed without what the change frees. Changes that were not planned are named as such.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

import torch

from undertow.errors import InfeasibleBudget, WayOut
from undertow.ir import InputKind, format_bytes
from undertow.ops.updates import ELEMENTWISE_OPTIMIZERS
from undertow.planner.plan import Planner
from undertow.report.columns import align, wrap
from undertow.report.page import render_page, section
from undertow.report.page_tables import table
from undertow.report.peak import find_peak
from undertow.report.timeline import Role, Timeline
from undertow.terms import Numerics, Terms


def refuse_budget(planner: Planner, smaller: Planner | None, terms: Terms) -> InfeasibleBudget:
    """The error for a budget below what `planner` found; `smaller` is the planner by kernels of least workspace."""
    least, lower_bound_bytes = planner.smallest, planner.curve.lower_bound_peak_bytes
    budget_bytes = terms.budget_bytes
    assert budget_bytes is not None
    timeline = Timeline(least)
    peak = find_peak(timeline)
    parts = tuple((name, size) for name, size in peak.parts if size)
    breakdown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    at = f"{peak.at.operation} {peak.at.layer} {peak.at.location}".rstrip() if peak.at is not None else ""
    other_bits = None if smaller is None else smaller.smallest.peak_bytes
    if other_bits is not None and other_bits >= least.peak_bytes:
        other_bits = None
    message = (
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) cannot be met: the least found is "
        f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), and less than "
        f"{format_bytes(lower_bound_bytes)} is impossible. At the peak{at and f' at {at}'}: {breakdown}"
    )
    return InfeasibleBudget(
        message,
        least.peak_bytes,
        lower_bound_bytes,
        other_bits,
        budget_bytes=budget_bytes,
        at=at,
        parts=parts,
        ways=tuple(way for way in _ways_out(timeline, other_bits) if way.peak_bytes <= budget_bytes),
        hints=_hints(timeline, terms),
        least=replace(least, budget_bytes=budget_bytes),
    )


def _ways_out(timeline: Timeline, other_bits: int | None) -> list[WayOut]:
    """Changes with the peak that the step then has, whether that fits or not."""
    least = timeline.plan
    ways = []
    if other_bits is not None:
        change = "allow_other_bits=True, which takes kernels of less workspace and changes bits"
        ways.append(WayOut(change, other_bits))
    if state := least.held.get("optimizer state", 0):
        ways.append(WayOut("an optimizer without state", least.peak_bytes - state))
    if Role.GRADIENT in timeline.roles.values() and not state:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
        change = (
            f"ut.train_step with an optimizer ({names}; SGD has no state) and neither clip_norm nor accumulate, which "
            f"updates inside the backward pass"
        )
        ways.append(WayOut(change, _peak_without_gradients(timeline)))
    return ways


def _peak_without_gradients(timeline: Timeline) -> int:
    """The peak if every gradient were freed by the update that follows the operation that completes it."""
    plan = timeline.plan
    live, nodes = list(plan.live_bytes), plan.nodes
    for life in timeline.lives:
        if timeline.roles[life.number] is Role.GRADIENT:
            # Handing it over costs nothing, so a plan may do that at the end; an update would not wait.
            readers = [position for position in life.readers if nodes[position].operation.hands_over is None]
            used = max((*life.writers, *readers), default=life.first)
            for position in range(used + 1, life.last + 1):
                live[position] -= life.num_bytes
    return max(live, default=plan.peak_bytes)


def _hints(timeline: Timeline, terms: Terms) -> tuple[str, ...]:
    """Changes that may help; to plan them, other kernels or another model would have to be measured."""
    inputs = timeline.plan.program.inputs
    weights = [item.value.tensor_type.dtype for item in inputs if item.kind is InputKind.PARAMETER]
    if torch.float32 not in weights:
        return ()
    half = ('numerics="bf16", with float32 weights',) if terms.numerics is not Numerics.BF16 else ()
    return (*half, "model.bfloat16()")


def print_refusal(refusal: InfeasibleBudget) -> str:
    """The refusal for a terminal: short tables, the verdict last."""
    rows = [("  " + name, format_bytes(size)) for name, size in refusal.parts]
    parts = [wrap(f"least memory, at {refusal.at}" if refusal.at else "least memory"), align(rows, "<>")]
    sizes = [
        ("  budget", *_sizes(refusal.budget_bytes)),
        ("  least found", *_sizes(refusal.minimum_bytes)),
        ("  impossible below", *_sizes(refusal.lower_bound_bytes)),
    ]
    parts += ["", align(sizes, "<>>"), "", "what would fit the budget"]
    for way in refusal.ways:
        parts.append(wrap(f"{format_bytes(way.peak_bytes)}: {way.change}", "  "))
    parts += [] if refusal.ways else ["  no single change that was planned"]
    parts += ["not planned, may help", *(wrap(hint, "  ") for hint in refusal.hints)] if refusal.hints else []
    verdict = (
        f"the budget of {format_bytes(refusal.budget_bytes)} cannot be met: the least found is "
        f"{format_bytes(refusal.minimum_bytes)}"
    )
    return "\n".join([*parts, "", wrap(verdict)])


def refusal_to_dict(refusal: InfeasibleBudget) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "fits": False,
        "error": str(refusal),
        "budget_bytes": refusal.budget_bytes,
        "minimum_bytes": refusal.minimum_bytes,
        "lower_bound_bytes": refusal.lower_bound_bytes,
        "other_bits_minimum_bytes": refusal.other_bits_minimum_bytes,
        "peak": {"at": refusal.at, "parts": dict(refusal.parts)},
        "ways": [vars(way) for way in refusal.ways],
        "hints": list(refusal.hints),
    }


def render_refusal(refusal: InfeasibleBudget, title: str) -> str:
    """The page of the plan that comes nearest, with the ways out."""
    rows = [(way.change, format_bytes(way.peak_bytes)) for way in refusal.ways]
    found = table(("change", "peak"), rows, ("", "number")) if rows else "<p>No single change that was planned.</p>"
    hints = "".join(f"<li>{escape(hint)}</li>" for hint in refusal.hints)
    more = f'<p class="note">Not planned, may help:</p><ul>{hints}</ul>' if hints else ""
    return render_page(refusal.least, title=title, advice=section("What would fit the budget", found, more))


def _sizes(num_bytes: int) -> tuple[str, str]:
    return format_bytes(num_bytes), f"{num_bytes:,} bytes"
