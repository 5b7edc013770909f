"""The pipeline, from top to bottom: record, passes, differentiate, plan, check, run.

In: a Request, which is what a user asked for, and the arguments of a call. Out: a Step that runs.

    captured = record(request, args, kwargs)             the forward pass
    pattern = expected_pattern(request, captured)        the outputs from which gradients come
    program = derive(request, captured.program, pattern)  passes, differentiation, passes, updates
    plan = plan_step(request, captured, pattern)         derive, plan for the budget, check
    step = make_step(request, captured, pattern)         the plan, bound to live things

Everything uses this pipeline: planned modules, training steps, reports, inspection, tuning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from undertow import alternatives as alternatives  # importing these registers all that is in them
from undertow import fast as fast
from undertow import rules as rules
from undertow.alternatives.registry import find_alternatives
from undertow.autodiff.backward import differentiate
from undertow.costs.compiling import compile_apart
from undertow.costs.table import find_costs, find_workspaces
from undertow.doing import doing
from undertow.errors import CallError, PlanError
from undertow.free_memory import find_free_memory
from undertow.garbage import no_collection
from undertow.ir import Node, Plan, Program
from undertow.ir.check_plan import check_plan
from undertow.ir.cleaning import forget_unread, remove_unused
from undertow.ir.cost import Cost, signature
from undertow.ir.plan import Outcome
from undertow.ir.saving import SavedPlan
from undertow.ir.structure import Slot
from undertow.memory.destinations import assumed_workspace
from undertow.memory.tables import make_plan, with_costs
from undertow.ops.interpret import NO_LIVE
from undertow.passes.batch_norm_folding import fold_batch_norms
from undertow.passes.choose import choose_kernels
from undertow.passes.fusion import fuse
from undertow.passes.gradients import lay_out_gradients, part_gradients
from undertow.passes.held_weights import hold_prepared
from undertow.passes.layout import use_channels_last
from undertow.passes.oversized import compact_oversized
from undertow.passes.shape_only import forget_shape_only_reads
from undertow.passes.training import Training
from undertow.passes.views import undo_views
from undertow.planner.neighbours import Neighbours
from undertow.planner.plan import Planner, make_planner
from undertow.record.capture import Captured, capture
from undertow.record.losses import find_loss
from undertow.record.precision import with_precision
from undertow.report.refusal import refuse_budget
from undertow.runtime.arena import ArenaMemory
from undertow.runtime.cuda_graphs import GRAPH_EXTRA, is_for_graph, with_graph_memory, without_graph_memory
from undertow.runtime.held import THERE_BEFORE, held_bytes
from undertow.runtime.step import Pattern, Step
from undertow.terms import CostSource, Numerics, Preference, Terms

NEAR_NOTE = "the schedule was found for a near shape, and checked for this one: a search may find a faster one"


@dataclass(frozen=True, eq=False)
class Request:
    """What a user asked for: a function of a model, the terms, and what to do with the gradients.

    Without `training`, gradients come from the outputs that the user differentiates, and go to autograd.
    """

    model: torch.nn.Module
    function: Callable[..., Any]
    terms: Terms
    training: Training | None = None
    is_strict: bool = False  # an operation without a rule is an error
    neighbours: Neighbours = field(default_factory=Neighbours, repr=False)  # steps of other shapes that were searched
    memory: ArenaMemory = field(default_factory=ArenaMemory, repr=False)  # of the arenas of its steps

    @cached_property
    def forward(self) -> Callable[..., Any]:
        """The function, in the precision that the terms ask for."""
        return with_precision(self.terms.numerics, self.model, self.function)

    @property
    def live(self) -> Mapping[str, Any]:
        """The live things that updates of the step are bound to."""
        return NO_LIVE if self.training is None else self.training.live


def record(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """The forward pass as a Program: the function, run once on tensors without data."""
    with doing("recording the model"), no_collection():
        captured = capture(request.forward, args, kwargs, request.model)
    if request.training is not None:
        _check_loss(captured)
    return captured


def expected_pattern(request: Request, captured: Captured) -> Pattern:
    """The outputs from which gradients will come: the model's own loss where it returns one, else all that can.

    A training step has none, since it differentiates its loss itself.
    """
    if request.training is not None:
        return ()
    places = differentiable_outputs(captured.program)
    outputs = captured.program.outputs

    def is_scalar(item: Any) -> bool:
        return isinstance(item, Slot) and item.index in places and outputs[item.index].tensor_type.shape == ()

    loss = find_loss(captured.skeleton, is_scalar)
    if isinstance(loss, Slot) and loss.index in places:
        return tuple(place == loss.index for place in places)
    return (True,) * len(places)


def differentiable_outputs(program: Program) -> list[int]:
    """The positions of outputs that carry a gradient; an input that is returned carries its own."""
    inputs = {item.value for item in program.inputs}
    return [
        place for place, value in enumerate(program.outputs) if value in program.differentiable and value not in inputs
    ]


def derive(
    request: Request,
    program: Program,
    pattern: Pattern,
    *,
    preference: Preference = Preference.TIME,
    is_holding: bool = True,
) -> Program:
    """The step as one Program: the forward pass, its derivative and the updates, with kernels that the terms allow.

    `is_holding`: an evaluation holds prepared weights from call to call.
    """
    program = derive_gradients(request, program, pattern, preference=preference)
    program = part_gradients(program) if request.training is None else request.training.add_to(program, request.terms)
    return hold_prepared(program) if is_holding else program


def derive_gradients(
    request: Request, program: Program, pattern: Pattern, *, preference: Preference = Preference.TIME
) -> Program:
    """The forward pass and its derivative, before anything is done with the gradients."""
    terms = request.terms
    is_fast, is_on_gpu = terms.numerics is not Numerics.EXACT, _is_on_gpu(program)
    places = differentiable_outputs(program)
    if request.training is not None:
        pattern = tuple(place == 0 for place in places)  # the loss
        program = request.training.before_differentiating(program)
    if is_fast:
        program = use_channels_last(program)
    if is_fast and not any(pattern) and not is_on_gpu:
        program = fold_batch_norms(forget_unread(remove_unused(program)))
    if any(pattern):
        outputs = [program.outputs[place] for place, is_wanted in zip(places, pattern, strict=True) if is_wanted]
        inputs = [item.value for item in program.inputs if item.value in program.differentiable]
        with no_collection():
            program = differentiate(program, outputs, inputs, is_strict=request.is_strict, takes_rows=True)
        program = forget_shape_only_reads(program)
    program = undo_views(remove_unused(program))
    if is_fast and is_on_gpu:
        program = fuse(program)
        _compile(program.nodes)
    elif is_fast:
        costs = partial(find_costs, terms=replace(terms, costs=CostSource.MEASURED), live=NO_LIVE)
        program = choose_kernels(program, costs, _RANKING[preference])
    return compact_oversized(lay_out_gradients(program, is_fast=is_fast))


_RANKING: dict[Preference, Callable[[Cost], Any]] = {
    Preference.TIME: lambda cost: cost.duration_ns,
    Preference.WORKSPACE: lambda cost: (cost.workspace_bytes, cost.duration_ns),
}


def find_held(request: Request, program: Program) -> dict[str, int]:
    """What the step holds throughout, in bytes, by what it is."""
    in_shards = request.training is not None and request.training.shards is not None
    held = held_bytes(request.model, program, request.terms.optimizer, in_shards)
    if request.training is None:
        return held
    norm_bytes = sum(tensor.nbytes for tensor in request.training.norm_tensors())
    more = {
        "gradients": request.training.added_up_bytes(),
        "gradient norms": norm_bytes,
        "masks": sum(tensor.nbytes for tensor in request.training.mask_tensors()),
        **request.training.held_by_shards(program),
    }
    return held | {name: size for name, size in more.items() if size}


def plan_step(request: Request, captured: Captured, pattern: Pattern) -> Plan:
    """The checked plan of a step. Without a budget nothing is searched: operations run as they were derived."""
    if request.terms.budget_bytes is not None:
        return search_plan(request, captured, pattern)[0]
    plan = _plan_as_derived(request, derive(request, captured.program, pattern))
    link = request.training.link if request.training is not None else None
    if link is None:
        return plan
    # Ranks wait for each other, so they want to know how long. Rank 0 measures for all.
    terms = request.terms if link.ranks.rank == 0 else replace(request.terms, costs=CostSource.MODEL)
    cost_of = find_costs(plan.nodes, terms, {**captured.live, **request.live})
    return _count(plan, cost_of, request.terms.costs is CostSource.MEASURED)


def _plan_as_derived(request: Request, program: Program) -> Plan:
    plan = make_plan(
        program,
        held=find_held(request, program),
        table=request.terms.table,
        notes=_notes(request, program),
    )
    return check_plan(with_graph_memory(plan) if is_for_graph(plan) else plan)


def count_workspaces(request: Request, plan: Plan, live: Mapping[str, Any]) -> Plan:
    """The plan of a step without a budget, with what kernels take for themselves; measured now, since somebody asks.

    It stays as it is where nothing is to be measured, or where the step may not fit into what is free.
    """
    if plan.has_measured_costs or plan.budget_bytes is not None or request.terms.costs is CostSource.MODEL:
        return plan
    device = next((value.tensor_type.device for node in plan.nodes for value in node.named_outputs), None)
    most = with_costs(plan, [Cost(0, assumed_workspace(node)) for node in plan.nodes])
    if most.peak_bytes - sum(plan.held.get(name, 0) for name in THERE_BEFORE) > find_free_memory(device).free_bytes:
        return plan
    with doing("measuring what kernels take for themselves"):
        cost_of = find_workspaces(plan.nodes, request.terms, live)
    return _count(plan, cost_of, True)


def _count(plan: Plan, cost_of: Callable[[Node], Cost], is_measured: bool) -> Plan:
    """The same plan with costs."""
    is_graph = GRAPH_EXTRA in plan.held
    counted = with_costs(without_graph_memory(plan), [cost_of(node) for node in plan.nodes])
    counted = with_graph_memory(counted) if is_graph else counted
    return check_plan(replace(counted, has_measured_costs=is_measured))


def search_plan(request: Request, captured: Captured, pattern: Pattern) -> tuple[Plan, Planner]:
    """The checked plan within the budget, and the planner it is from; raises InfeasibleBudget.

    Where nothing fits, kernels with the least workspace are tried, if the terms allow other bits. After that, weights
    are prepared in every call instead of being held, with the same bits.
    """
    terms = request.terms
    live = {**captured.live, **request.live}
    compile_apart()
    for is_holding in (True, False):
        derive_by = partial(derive, request, captured.program, pattern, is_holding=is_holding)
        program = derive_by(preference=Preference.TIME)
        near = find_near_planner(request, program, live)
        plan = None if near is None else near.plan_within(terms.budget_bytes)
        if near is not None and plan is not None:
            near_notes = (*_notes(request, plan.program), NEAR_NOTE)
            return check_plan(replace(_leave_room_for_graph(near, plan), notes=near_notes)), near
        planner, smaller = find_planner(request, program, live), None
        if terms.budget_bytes is None:  # then operations run as they were derived
            plan = _count(_plan_as_derived(request, program), planner.cost_of, planner.has_measured_costs)
            return planner.with_bound(plan), planner
        notes: tuple[str, ...] = ()
        plan = planner.plan_within(terms.budget_bytes)
        if plan is None and terms.numerics is not Numerics.EXACT:
            other = derive_by(preference=Preference.WORKSPACE)
            if list(map(signature, other.nodes)) != list(map(signature, program.nodes)):
                smaller = find_planner(request, other, live)
        if smaller is not None and terms.allows_other_bits:
            plan = smaller.plan_within(terms.budget_bytes)
            notes = ("the fastest kernels do not fit: kernels with the least workspace run, and round differently",)
        if plan is not None:
            planner, notes = smaller or planner, (*_notes(request, plan.program), *notes)
            return check_plan(replace(_leave_room_for_graph(planner, plan), notes=notes)), planner
        if program.preparation is None:
            break
    raise refuse_budget(planner, smaller, terms)


def find_planner(request: Request, program: Program, live: Mapping[str, Any]) -> Planner:
    """The planner of a derived step: its operations measured, its curve found."""
    found = find_alternatives(program)
    nodes = [*program.nodes, *(alternative.node for alternative in found)]
    _compile(nodes)
    costs = find_costs(nodes, request.terms, live)
    with doing(f"searching for plans of {len(program.nodes):,} operations"):
        planner = make_planner(
            program,
            found,
            costs,
            find_held(request, program),
            has_measured_costs=request.terms.costs is CostSource.MEASURED,
            time_limit_s=request.terms.time_limit_s,
        )
    request.neighbours.add(nodes, planner)
    return planner


def find_near_planner(request: Request, program: Program, live: Mapping[str, Any]) -> Planner | None:
    """The planner of a derived step by the curve of a near shape; None where none was searched yet."""
    if request.neighbours.is_empty:
        return None
    found = find_alternatives(program)
    _compile([*program.nodes, *(alternative.node for alternative in found)])
    held = find_held(request, program)
    return request.neighbours.find_planner(program, found, request.terms.table, held, live)


def adopt_plan(request: Request, captured: Captured, pattern: Pattern, saved: SavedPlan) -> Plan:
    """The saved plan, perhaps from another machine, if it is a plan of this step; raises PlanError if not.

    The step is derived here again, with the kernels that were chosen when the plan was made.
    """
    request.terms.table.update(saved.costs())
    for preference, is_holding in itertools.product(Preference, (True, False)):
        program = derive(request, captured.program, pattern, preference=preference, is_holding=is_holding)
        if saved.is_of(program):
            _compile(program.nodes)
            plan = saved.read(program)
            break
    else:
        raise PlanError(
            f"{saved.name} is the plan of another step: model, arguments, optimizer, numerics, passes and versions "
            f"must be as they were when it was saved"
        )
    for name, size in find_held(request, program).items():
        if size > plan.held.get(name, 0):
            raise PlanError(f"{saved.name} counts {plan.held.get(name, 0)} bytes of {name}, and there are {size}")
    budget_bytes = request.terms.budget_bytes
    if budget_bytes is not None and plan.peak_bytes > budget_bytes:
        raise PlanError(f"{saved.name} needs {plan.peak_bytes} bytes, and the budget is {budget_bytes} bytes")
    return plan


def make_step(request: Request, captured: Captured, pattern: Pattern, saved: SavedPlan | None = None) -> Step:
    """The recorded step, planned and ready to run."""
    plan = plan_step(request, captured, pattern) if saved is None else adopt_plan(request, captured, pattern, saved)
    return Step(plan, pattern, {**captured.live, **request.live}, request.memory)


def _check_loss(captured: Captured) -> None:
    slot, program = captured.skeleton, captured.program
    is_one = isinstance(slot, Slot) and slot.index in differentiable_outputs(program)
    if not is_one or program.outputs[slot.index].tensor_type.num_elements != 1:
        raise CallError("the loss must be one scalar tensor that depends on a parameter; sum it, or take its mean")


def _leave_room_for_graph(planner: Planner, plan: Plan) -> Plan:
    """A plan that also fits as a CUDA graph; `plan` itself where there is none, or where it cannot be captured."""
    budget_bytes, smaller = plan.budget_bytes, plan
    while is_for_graph(smaller):
        whole = with_graph_memory(smaller)
        if budget_bytes is None or whole.peak_bytes <= budget_bytes:
            outcome = plan.outcome if smaller is plan else Outcome.FEASIBLE
            return replace(whole, budget_bytes=budget_bytes, lower_bound_ns=plan.lower_bound_ns, outcome=outcome)
        wanted_bytes = max(smaller.peak_bytes - (whole.peak_bytes - budget_bytes), planner.smallest.peak_bytes)
        if wanted_bytes >= smaller.peak_bytes:
            break
        found = planner.plan_within(wanted_bytes)
        assert found is not None
        smaller = found
    return plan


def _notes(request: Request, program: Program) -> tuple[str, ...]:
    """Notes for the reader of a plan: what it does not count, and where the optimizer steps."""
    names = {node.name for node in program.nodes if node.operation.runs_user_code}
    notes: tuple[str, ...] = () if request.training is None else request.training.notes(program)
    notes += (request.terms.budget_note,) if request.terms.budget_note else ()
    if not names:
        return notes
    unseen = f"what custom autograd Functions keep and allocate inside is not counted: {', '.join(sorted(names))}"
    return (unseen, *notes)


def _compile(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if node.operation.compile is not None:
            node.operation.compile()


def _is_on_gpu(program: Program) -> bool:
    return any(item.value.tensor_type.device.type == "cuda" for item in program.inputs)
