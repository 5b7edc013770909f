"""`report_stages`: what the ranks of a mesh would run and hold, before any of them is started.

In: a model, a call, a loss, a mesh. Out: a StagesReport. A model without a loss of its own is planned with the mean of
its outputs in its place.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from undertow.api.calls import check_call, check_optimizer
from undertow.api.stage_planning import StagesPlan
from undertow.api.staged_step import plan_stages
from undertow.api.terms import parse_terms
from undertow.api.training import Loss, make_step
from undertow.errors import CallError
from undertow.ir import InputKind
from undertow.ir.structure import tensors_in
from undertow.ranks.mesh import Mesh
from undertow.record.losses import find_loss, is_scalar_tensor
from undertow.report.stages import LinkRow, StageRow, StagesReport


def report_stages(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh,
    shards: int,
    schedule: str = "1f1b",
    targets: tuple[Any, ...] = (),
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    numerics: str = "exact",
    costs: str = "measured",
    title: str = "",
) -> StagesReport:
    """Cut, schedule and plan a model for a mesh; raises InfeasibleBudget."""
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    if shards < mesh.data:
        raise CallError(f"{shards} shards cannot be divided over {mesh.data} rows of ranks; give more shards")
    terms = parse_terms(
        model,
        budget=budget,
        optimizer=optimizer,
        costs=costs,
        time_limit_s=math.inf,
        numerics=numerics,
        allow_other_bits=False,
    )
    num_args = len(args) if loss is not None else len((*args, *targets))
    make = partial(make_step, model, num_args, loss or _own_or_mean, optimizer, terms)
    call = (*args, *targets)
    return _describe(plan_stages(make, shards, mesh, schedule, call, kwargs or {}), title, terms.budget_bytes)


def _own_or_mean(outputs: Any) -> torch.Tensor:
    """The model's own loss, or the mean of what it returns."""
    found = find_loss(outputs, is_scalar_tensor)
    if found is not None:
        return found
    tensors = [tensor for _, tensor in tensors_in(outputs) if tensor.dtype.is_floating_point]
    if not tensors:
        raise CallError("the model returns no tensor that could be differentiated")
    return torch.stack([tensor.mean() for tensor in tensors]).sum()


def _describe(plan: StagesPlan, title: str, budget_bytes: int | None) -> StagesReport:
    schedule, parts = plan.schedule, plan.parts.parts
    stages = []
    bounds = [0, *plan.cut.starts, len(plan.profile.names)]
    for stage, times in enumerate(plan.cut.stages):
        size = sum(
            item.value.type.num_bytes for item in parts[stage].program.inputs if item.kind is InputKind.PARAMETER
        )
        name = plan.profile.names[bounds[stage]]
        stages.append(StageRow(name, bounds[stage + 1] - bounds[stage], times, size))
    links: dict[tuple[int, int], tuple[int, int]] = {}
    for route in plan.parts.routes:
        count, size = links.get((route.source, route.target), (0, 0))
        links[route.source, route.target] = count + 1, size + route.num_bytes
    largest = [max(plans.values(), key=lambda item: item.peak_bytes) for plans in plan.ranks]
    return StagesReport(
        title=title,
        schedule=schedule,
        timing=plan.cut.timing,
        bound=plan.bound,
        stages=stages,
        links=[LinkRow(*pair, *found) for pair, found in sorted(links.items())],
        held=[
            {**item.held, "values of the shard that runs": item.peak_bytes - sum(item.held.values())}
            for item in largest
        ],
        peak_bytes=[item.peak_bytes for item in largest],
        budget_bytes=budget_bytes,
        is_recomputed=[any(item.recomputed for item in plans.values()) for plans in plan.ranks],
        num_rows=plan.layout.mesh.data,
    )
