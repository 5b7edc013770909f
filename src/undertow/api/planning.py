"""`plan`: a module that trains by an explicit, derived backward pass, within a budget if one is given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import torch

from undertow.api.calls import check_call, check_optimizer
from undertow.api.terms import parse_terms
from undertow.calls.planned import make_planned
from undertow.calls.smaller_batch import offering_smaller_batch
from undertow.errors import CallError
from undertow.ir.saving import read_plan

Model = TypeVar("Model", bound=torch.nn.Module)


def plan(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    numerics: str = "exact",
    allow_other_bits: bool = False,
    strict: bool = False,
    costs: str = "measured",
    time_limit_s: float = math.inf,
    saved_plan: str | Path | None = None,
) -> Model:
    """A module with the model's parameters that trains by an explicit, derived backward pass.

    `budget` is the peak memory of the whole step, in bytes or as "6GiB". `optimizer` is only needed to count its state.
    `numerics="fast"` takes the fastest measured algorithms, within their error bounds, and times them at first use;
    `"bf16"` also computes in bfloat16, from float32 weights. Where these do not fit the budget, `allow_other_bits`
    allows others that need less memory. `costs="model"` plans without measuring. `time_limit_s` ends the search for a
    plan early. `saved_plan` is a file that `save_plan` wrote for the same step: it is run instead of a new plan.
    """
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
    if hasattr(model, "undertow_runner"):
        raise CallError("model is already planned; plan the module it was made from")
    planned = make_planned(model, terms, strict)
    runner = planned.undertow_runner
    with offering_smaller_batch(runner.request, args, kwargs or {}):
        runner.prepare(args, kwargs or {}, None if saved_plan is None else read_plan(saved_plan))
    return planned
