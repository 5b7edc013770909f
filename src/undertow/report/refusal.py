"""The refusal of a budget that cannot be met: the least that fits, what takes the room, and the ways out.

In: the planner of the step and, where there is one, the planner of the step by kernels of least workspace. Out: the
error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.errors import InfeasibleBudget
from undertow.ir import InputKind, Plan, format_bytes
from undertow.ops.updates import SEPARABLE_OPTIMIZERS
from undertow.planner.plan import Planner
from undertow.report.peak import find_peak
from undertow.report.timeline import Role, Timeline
from undertow.terms import Numerics, Terms


def refuse_budget(planner: Planner, smaller: Planner | None, terms: Terms) -> InfeasibleBudget:
    """The error for a budget below what `planner` found; `smaller` is the planner by kernels of least workspace."""
    least, lower_bound_bytes = planner.smallest, planner.curve.lower_bound_peak_bytes
    budget_bytes = terms.budget_bytes
    assert budget_bytes is not None
    peak = find_peak(Timeline(least))
    parts = dict(peak.parts)
    breakdown = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.parts if size)
    where = f" at {peak.at.operation} {peak.at.layer} {peak.at.location}".rstrip() if peak.at is not None else ""
    other_bits = None if smaller is None else smaller.smallest.peak_bytes
    if other_bits is not None and other_bits >= least.peak_bytes:
        other_bits = None
    ways = _ways_out(least, parts, other_bits, terms)
    message = (
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) cannot be met: the least found is "
        f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), and less than "
        f"{format_bytes(lower_bound_bytes)} is impossible. At the peak{where}: {breakdown}. "
        f"What would fit: {'; '.join(ways)}"
    )
    return InfeasibleBudget(message, least.peak_bytes, lower_bound_bytes, other_bits)


def _ways_out(least: Plan, parts: Mapping[str, int], other_bits: int | None, terms: Terms) -> list[str]:
    """What would fit, each with about how much it needs; `parts` are the bytes at the least plan's peak."""
    gradients = parts.get(Role.GRADIENT.value, 0)
    state = parts.get("optimizer state", 0)
    lasting = sum(least.held.values()) - parts.get("batch", 0) + gradients
    passing = max(least.peak_bytes - lasting, 0)
    ways = [f"a budget of {format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes)"]
    if other_bits is not None:
        ways.append(
            f"allow_other_bits=True, which takes kernels of less workspace and changes bits: "
            f"{format_bytes(other_bits)} ({other_bits} bytes)"
        )
    ways.append(f"half the batch: about {format_bytes(lasting + passing // 2)}")
    if gradients:
        rest = format_bytes(least.peak_bytes - gradients)
        names = ", ".join(kind.__name__ for kind in SEPARABLE_OPTIMIZERS)
        ways.append(
            f"ut.train_step with an optimizer ({names}) and neither clip_norm nor accumulate, which updates inside the "
            f"backward pass: about {rest}"
        )
    weights = [item.value.tensor_type.dtype for item in least.program.inputs if item.kind is InputKind.PARAMETER]
    if torch.float32 in weights and terms.numerics is not Numerics.BF16:
        ways.append(f'numerics="bf16", with float32 weights: about {format_bytes(lasting + passing // 2)}')
    if torch.float32 in weights:
        ways.append(f"model.bfloat16(): about {format_bytes(least.peak_bytes // 2)}")
    if state:
        ways.append(f"an optimizer without state: {format_bytes(least.peak_bytes - state)}")
    return ways
