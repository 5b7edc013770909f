"""The pipeline, spelled out once: capture, autodiff, runtime.

Public names live here and are re-exported by the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from undertow import alternatives as alternatives  # they and the rules are registered
from undertow import rules as rules
from undertow.api.budget_planning import (
    Numerics,
    Preference,
    Terms,
    held_bytes,
    measured_costs,
    notes_of,
    parse_terms,
    plan_for_budget,
)
from undertow.api.calls import check_call, check_optimizer
from undertow.api.precision import with_precision
from undertow.autodiff.backward import differentiate
from undertow.calls.planned import Runner, differentiable_outputs, guess_pattern, make_planned
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import Plan, Program
from undertow.ir.cleaning import forget_unread, remove_unused
from undertow.ir.cost import Cost
from undertow.memory.tables import make_plan
from undertow.ops.interpret import NO_LIVE
from undertow.passes.batch_norm_folding import fold_batch_norms
from undertow.passes.choose import choose_kernels, lay_out_gradients
from undertow.passes.fusion import fuse
from undertow.passes.held_weights import hold_prepared
from undertow.passes.layout import use_channels_last
from undertow.passes.oversized import compact_oversized
from undertow.passes.shape_only import forget_shape_only_reads
from undertow.record.capture import Captured, capture
from undertow.record.origins import place_of
from undertow.record.python_state import state_put_back
from undertow.runtime.step import Pattern


def plan(
    model: torch.nn.Module,
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
) -> Any:
    """A module with the model's parameters that trains by an explicit, derived backward pass.

    `budget` is the peak memory of the whole step, in bytes or as "6GiB"; `optimizer` only counts: its state is held.
    `numerics="fast"` takes the fastest measured algorithms, within their error bounds, and times them at first use;
    `"bf16"` also computes in bfloat16, from float32 weights. Where those do not fit the budget, `allow_other_bits` lets
    others be taken that need less memory. `costs="model"` plans without measuring. `time_limit_s` ends the search for a
    plan early.
    """
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    terms = parse_terms(
        budget=budget,
        optimizer=optimizer,
        costs=costs,
        time_limit_s=time_limit_s,
        numerics=numerics,
        allow_other_bits=allow_other_bits,
    )
    if hasattr(model, "undertow_runner"):
        raise CallError("model is already planned; plan the module it was made from")
    planned = make_planned(model, RunnerMaker(strict, terms))
    planned.undertow_runner.prepare(args, kwargs or {})
    return planned


@dataclass(frozen=True)
class RunnerMaker:
    """How a planned module's runner is made; kept with the module, so that a copy or a pickle can make its own."""

    is_strict: bool
    terms: Terms

    def __call__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> Runner:
        forward = with_precision(self.terms.numerics, module, forward)
        plan_step = partial(self.plan_step, module)
        return Runner(module, forward, capture, plan_step, place_of, state_put_back, guess_pattern, NO_LIVE)

    def plan_step(self, module: torch.nn.Module, captured: Captured, pattern: Pattern) -> Plan:
        """The plan for gradients from the outputs marked in `pattern`."""
        program, live = captured.program, captured.live

        @cache
        def derive_step(is_holding: bool, terms: Terms) -> tuple[Program, dict[str, int]]:
            derived = derive(program, pattern, terms, is_strict=self.is_strict)
            derived = hold_prepared(derived) if is_holding else derived
            return derived, held_bytes(module, derived, terms.optimizer)

        holding = partial(derive_step, True)
        if self.terms.budget_bytes is None:
            derived, held = holding(self.terms)
            notes = notes_of(derived)
            return make_plan(derived, held=held, table=self.terms.table, notes=notes)
        try:
            return plan_for_budget(holding, self.terms, live)[0]
        except InfeasibleBudget:
            if holding(self.terms)[0].preparation is None:
                raise
        # Where prepared weights do not fit, they are made in every call, with the same bits.
        return plan_for_budget(partial(derive_step, False), self.terms, live)[0]


def derive(program: Program, pattern: Pattern, terms: Terms, *, is_strict: bool = False) -> Program:
    """The Program with the backward pass from the outputs marked in `pattern`, by the kernels that `terms` allow."""
    is_fast = terms.numerics is not Numerics.EXACT
    if is_fast:
        program = use_channels_last(program)
    if is_fast and not any(pattern) and not _is_on_gpu(program):
        program = fold_batch_norms(forget_unread(remove_unused(program)))
    if any(pattern):
        carriers = [program.outputs[place] for place in differentiable_outputs(program)]
        outputs = [value for value, is_present in zip(carriers, pattern, strict=True) if is_present]
        wanted = [item.value for item in program.inputs if item.value in program.differentiable]
        program = forget_shape_only_reads(differentiate(program, outputs, wanted, is_strict=is_strict))
    program = remove_unused(program)
    if is_fast and _is_on_gpu(program):
        program = lay_out_gradients(fuse(program))
        for node in program.nodes:
            if node.operation.compile is not None:
                node.operation.compile()
    elif is_fast:
        program = lay_out_gradients(choose_kernels(program, partial(measured_costs, terms), _RANKING[terms.preference]))
    return compact_oversized(program)


_RANKING: dict[Preference, Callable[[Cost], Any]] = {
    Preference.TIME: lambda cost: cost.duration_ns,
    Preference.WORKSPACE: lambda cost: (cost.workspace_bytes, cost.duration_ns),
}


def _is_on_gpu(program: Program) -> bool:
    return any(item.value.tensor_type.device.type == "cuda" for item in program.inputs)
