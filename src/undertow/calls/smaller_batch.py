"""The batch that would fit a budget that was refused, found by planning the step for fewer examples.

In: the refusal, and the call that it is about. Out: the same refusal, with that batch among the ways out. The plan is
made from modelled costs, which takes no measuring. Modelled costs have no workspace, so each operation is taken to need
what it needs in the refused step, where it has more examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from undertow.errors import InfeasibleBudget, WayOut
from undertow.ir import Node, Plan
from undertow.ir.structure import list_tensors, replace_tensors
from undertow.pipeline import Request, derive, expected_pattern, find_planner, record
from undertow.terms import CostSource, Numerics

MAX_TRIES = 3


@contextmanager
def offering_smaller_batch(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], num_parts: int = 1
) -> Iterator[None]:
    """A refusal that is raised inside leaves with the batch that would fit, where there is one.

    The call may be on one of several parts of a batch.
    """
    try:
        yield
    except InfeasibleBudget as refusal:
        found = _find_smaller_batch(refusal, request, args, kwargs, num_parts)
        if found is not None:
            refusal.ways = (found, *refusal.ways)
        raise


def _find_smaller_batch(
    refusal: InfeasibleBudget, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], num_parts: int
) -> WayOut | None:
    sizes = [len(tensor) for tensor in list_tensors(args, kwargs) if tensor.dim()]
    # To choose fast kernels, a step for fewer examples would have to be measured.
    if not sizes or sizes[0] < 2 or request.terms.numerics is not Numerics.EXACT:
        return None
    batch = sizes[0]
    held_bytes = sum(refusal.least.held.values())
    room = max(refusal.budget_bytes - held_bytes, 0) / max(refusal.minimum_bytes - held_bytes, 1)
    fewer = min(max(int(batch * room), 1), batch - 1)
    for _ in range(MAX_TRIES):
        peak_bytes = _plan_for(fewer, batch, refusal, request, args, kwargs)
        if peak_bytes is None:
            return None
        if peak_bytes <= refusal.budget_bytes:
            num_fewer = fewer * num_parts
            examples = "1 example" if num_fewer == 1 else f"{num_fewer} examples"
            return WayOut(f"a batch of {examples} instead of {batch * num_parts}", peak_bytes)
        if fewer == 1:
            return None
        fewer //= 2
    return None


def _plan_for(
    fewer: int, batch: int, refusal: InfeasibleBudget, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """The least peak of the step for `fewer` examples; None where the model does not run with them."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:fewer] if tensor.dim() and len(tensor) == batch else tensor

    cut_args, cut_kwargs = replace_tensors((args, kwargs), cut)
    modelled = replace(request, terms=replace(request.terms, costs=CostSource.MODEL, table={}))
    try:
        with torch.enable_grad():
            captured = record(modelled, cut_args, cut_kwargs)
    except Exception:  # the model's own: its first dimension is no batch, or it does not run with so few
        return None
    program = derive(modelled, captured.program, expected_pattern(modelled, captured))
    planner = find_planner(modelled, program, {**captured.live, **request.live})
    return _peak_with_workspace(planner.smallest, refusal.least)


def _peak_with_workspace(plan: Plan, measured: Plan) -> int:
    """The peak of a modelled plan with the workspace that its operations have in a measured one."""
    known: dict[tuple[Any, ...], int] = {}
    for node, size in zip(measured.nodes, measured.tables.workspace_bytes, strict=True):
        known[_kind(node)] = max(size, known.get(_kind(node), 0))
    most = max(known.values(), default=0)
    peaks = (live + known.get(_kind(node), most) for node, live in zip(plan.nodes, plan.live_bytes, strict=True))
    return max(peaks, default=plan.peak_bytes)


def _kind(node: Node) -> tuple[Any, ...]:
    return node.name, node.origin.module_path, node.phase
