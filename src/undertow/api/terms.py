"""The terms of a step as users write them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.api.budgets import parse_budget
from undertow.api.calls import check_time_limit
from undertow.errors import CallError
from undertow.ir.cost import Cost
from undertow.terms import CostSource, Numerics, Terms


def parse_terms(
    model: torch.nn.Module,
    *,
    budget: int | str | None,
    optimizer: torch.optim.Optimizer | None,
    costs: str | Mapping[str, tuple[int, int]],
    time_limit_s: float,
    numerics: str,
    allow_other_bits: bool,
) -> Terms:
    """The terms that a user named; `costs` may be those that another step was planned from."""
    check_time_limit(time_limit_s)
    found = None if budget is None else parse_budget(budget, model, optimizer)
    return Terms(
        None if found is None else found.num_bytes,
        optimizer,
        parse_costs(costs) if isinstance(costs, str) else CostSource.MEASURED,
        time_limit_s,
        parse_numerics(numerics),
        {} if isinstance(costs, str) else {key: Cost(*cost) for key, cost in costs.items()},
        allow_other_bits,
        budget_note="" if found is None else found.note,
    )


def parse_numerics(numerics: str) -> Numerics:
    """The numerics that a user named."""
    if numerics not in list(Numerics):
        names = ", ".join(f'"{name}"' for name in Numerics)
        raise CallError(f"numerics must be one of {names}, got {numerics!r}")
    return Numerics(numerics)


def parse_costs(costs: str) -> CostSource:
    """The source of costs that a user named."""
    if costs not in list(CostSource):
        raise CallError(f'costs must be "measured" or "model", got {costs!r}')
    return CostSource(costs)
