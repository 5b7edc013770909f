"""`tradeoff`: the whole time/memory curve of a training step. `largest_batch`: how many examples a budget holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.budgets import parse_budget
from undertow.api.calls import check_call, check_time_limit, check_training
from undertow.api.measuring import measure
from undertow.api.terms import parse_costs
from undertow.api.training import Loss, TrainStep, make_step
from undertow.api.untouched import generators_put_back
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import format_bytes
from undertow.runtime.measure import Measurement
from undertow.terms import Terms

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
    check_training(model, optimizer, loss, targets)
    check_time_limit(time_limit_s)
    terms = Terms(None, optimizer, parse_costs(costs), time_limit_s)
    step = make_step(model, len(args), loss, optimizer, terms)
    curve = step.find_curve((*args, *targets), kwargs or {})
    fastest = curve.points[-1].time
    points = tuple(
        Point(item.peak_bytes, item.time / 1e3, (item.time - fastest) / max(fastest, 1)) for item in curve.points
    )
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

    It is found by planning, then confirmed by running the step; where that takes more memory than was predicted, fewer
    examples are tried. Parameters, buffers, gradients, the optimizer's state and generators are left as they were.
    """
    if not callable(make_batch):
        raise CallError(f"make_batch must be a function of the number of examples, got {type(make_batch).__name__}")
    budget_bytes = parse_budget(budget, model, optimizer).num_bytes
    terms = Terms(budget_bytes, optimizer, parse_costs(costs))
    ran: dict[int, LargestBatch] = {}

    def prepare(batch: int) -> tuple[TrainStep, tuple[Any, ...]]:
        args, targets = _check_batch(make_batch(batch))
        check_call(model, args, None)
        check_training(model, optimizer, loss, targets)
        step = make_step(model, len(args), loss, optimizer, terms)
        step.prepare((*args, *targets), {})
        return step, (*args, *targets)

    def can_run(batch: int) -> bool:
        step, arguments = prepare(batch)
        ran[batch] = LargestBatch(batch, step, measure(step, *arguments))
        return ran[batch].measured.peak_bytes <= budget_bytes

    with generators_put_back():  # make_batch may draw
        best = _find_most(prepare)
        if not can_run(best):
            best = _halve(can_run, 0, best)
    if best == 0:
        raise CallError(
            f"one example fits by the plan, and took {ran[1].measured.peak_bytes} bytes when it was run, more "
            f"than the budget of {budget_bytes} bytes"
        )
    return ran[best]


def _check_batch(made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise CallError(
            f"make_batch must return (args, targets), two tuples such as ((x,), (y,)), got {type(made).__name__}"
        )
    return made[0], made[1]


def _find_most(prepare: Callable[[int], Any]) -> int:
    """Doubles to an upper limit, then halves the interval; memory grows with the batch.

    It starts at two examples: batch normalisation cannot train on one. One is tried when two do not fit.
    """

    def fits(batch: int) -> bool:
        try:
            prepare(batch)
        except InfeasibleBudget:
            return False
        return True

    try:
        prepare(2)
    except InfeasibleBudget as refusal:
        try:
            prepare(1)
        except InfeasibleBudget:
            raise
        except Exception as error:  # the model's own: it runs with two examples and not with one
            raise refusal from error
        return 1
    low, high = 2, 4
    while fits(high):
        low, high = high, high * 2
        if high > MAX_BATCH:
            raise CallError(
                f"a batch of {low} fits and memory does not seem to grow with it; is make_batch(n) using n?"
            )
    return _halve(fits, low, high)


def _halve(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The most that fit, where `low` do and `high` do not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
