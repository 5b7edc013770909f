"""`tradeoff`: the whole time/memory curve of a training step. `largest_batch`: how many examples a budget holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.budget_planning import Terms, parse_costs
from undertow.api.budgets import parse_budget
from undertow.api.calls import check_call, check_optimizer
from undertow.api.measuring import measure
from undertow.api.training import Loss, TrainStep, make_step
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import format_bytes
from undertow.runtime.measure import Measurement

MAX_BATCH = 1 << 24


@dataclass(frozen=True)
class Point:
    """One plan on the curve; `extra` is its time over the fastest plan's, less one."""

    peak_bytes: int
    step_us: float
    extra: float


@dataclass(frozen=True)
class Tradeoff:
    """Plans of rising peak and falling time."""

    points: tuple[Point, ...]
    lower_bound_bytes: int

    @property
    def minimum_bytes(self) -> int:
        """The least budget for which a plan was found."""
        return self.points[0].peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return {"points": [vars(point) for point in self.points], "lower_bound_bytes": self.lower_bound_bytes}

    def __str__(self) -> str:
        lines = [f"{'peak':>12}  {'step':>10}  {'extra':>7}"]
        lines += [
            f"{format_bytes(point.peak_bytes):>12}  {point.step_us / 1e3:>7.1f} ms  {point.extra:>7.1%}"
            for point in self.points
        ]
        return "\n".join(lines)


def tradeoff(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    targets: tuple[Any, ...] = (),
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    costs: str = "measured",
    time_limit_s: float = math.inf,
) -> Tradeoff:
    """The fastest step at every peak memory, in one solve; nothing of the model is changed."""
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    terms = Terms(None, optimizer, parse_costs(costs), time_limit_s)
    step = make_step(model, len(args), loss, optimizer, terms)
    curve = step.find_curve((*args, *targets), kwargs or {})
    fastest = curve.points[-1].time
    points = tuple(Point(item.peak_bytes, item.time / 1e3, item.time / fastest - 1) for item in curve.points)
    return Tradeoff(points, curve.lower_bound_peak_bytes)


@dataclass(frozen=True)
class LargestBatch:
    """The most examples that fit, the step planned for them, and what running it once took."""

    batch: int
    step: TrainStep
    measured: Measurement

    def __int__(self) -> int:
        return self.batch


def largest_batch(
    model: torch.nn.Module,
    make_batch: Callable[[int], tuple[tuple[Any, ...], tuple[Any, ...]]],
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    costs: str = "measured",
) -> LargestBatch:
    """The largest n for which a step on `make_batch(n)`, which returns (args, targets), fits the budget.

    Computed by planning, then confirmed by running the step once: with an optimizer, that updates the parameters.
    """
    check_optimizer(model, optimizer)
    terms = Terms(parse_budget(budget), optimizer, parse_costs(costs))

    def try_batch(batch: int) -> TrainStep | InfeasibleBudget:
        args, targets = make_batch(batch)
        check_call(model, args, None)
        step = make_step(model, len(args), loss, optimizer, terms)
        try:
            step.prepare((*args, *targets), {})
        except InfeasibleBudget as refusal:
            return refusal
        return step

    best = _search_batch(try_batch)
    while True:
        step = try_batch(best)
        assert isinstance(step, TrainStep)
        args, targets = make_batch(best)
        measured = measure(step, *args, *targets)
        if measured.peak_bytes <= (terms.budget_bytes or 0):
            return LargestBatch(best, step, measured)
        best -= 1
        if best < 1:
            raise CallError("not even one example fits when it is run")


def _search_batch(try_batch: Callable[[int], TrainStep | InfeasibleBudget]) -> int:
    """Doubling to an upper end, then halving the interval; memory grows with the batch."""
    first = try_batch(1)
    if isinstance(first, InfeasibleBudget):
        raise first
    low, high = 1, 2
    while not isinstance(try_batch(high), InfeasibleBudget):
        low, high = high, high * 2
        if high > MAX_BATCH:
            raise CallError(
                f"a batch of {low} fits and memory does not seem to grow with it; is make_batch(n) using n?"
            )
    while high - low > 1:
        middle = (low + high) // 2
        if isinstance(try_batch(middle), InfeasibleBudget):
            high = middle
        else:
            low = middle
    return low
