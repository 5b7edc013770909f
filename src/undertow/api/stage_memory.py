"""The memory of a rank with stages: what it holds throughout, and plans that keep its peak within the budget.

In: the Programs of a rank's stages for each kind of shard, what they cost, a schedule. Out: a plan for each. Shards in
flight count with what they keep at the chosen points, so the plans of one rank are chosen together: all begin with
their fastest point, and as long as the rank's peak is too high, the stage that holds most takes its next smaller one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from undertow.alternatives.registry import find_alternatives
from undertow.api.stage_programs import Kind
from undertow.costs.compiling import compile_apart
from undertow.costs.optimizer_state import count_optimizer_state
from undertow.costs.table import find_costs
from undertow.errors import InfeasibleBudget
from undertow.ir import InputKind, Plan, Program, format_bytes
from undertow.ir.structure import tensors_in
from undertow.memory.tables import make_plan
from undertow.ops.interpret import generators_of
from undertow.ops.own import GENERATOR_STATE_BYTES
from undertow.ops.shards import KEEP_RECORD
from undertow.passes.training import Training
from undertow.planner.plan import Planner, make_planner
from undertow.stages.arrivals import Routes, most_arriving_bytes
from undertow.stages.memory import StageMemory, others_in_flight, rank_peak
from undertow.stages.schedules import Schedule
from undertow.terms import CostSource, Terms

IN_FLIGHT, ON_THEIR_WAY = "other shards in flight", "values on their way"


def find_rank_held(
    training: Training, programs: Mapping[Kind, Program], part: tuple[object, object], num_waiting: int
) -> dict[str, int]:
    """What a rank holds throughout, in bytes, by what it is. `part` are the arguments of the whole batch.

    `num_waiting` is how many sums over shards wait for each gradient.
    """
    parameters = dict(training.model.named_parameters(remove_duplicate=False))
    buffers = dict(training.model.named_buffers(remove_duplicate=False))
    found: dict[InputKind, dict[int, torch.Tensor]] = defaultdict(dict)
    owned: dict[int, torch.nn.Parameter] = {}
    constants: dict[str, int] = {}
    for program in programs.values():
        updated = {item.path for item in program.inputs if item.value.name in _updated(program)}
        for item in program.inputs:
            if item.kind is InputKind.PARAMETER:
                found[item.kind][id(parameters[item.path])] = parameters[item.path]
                if item.path in updated:
                    owned[id(parameters[item.path])] = parameters[item.path]
            elif item.kind is InputKind.BUFFER:
                found[item.kind][id(buffers[item.path])] = buffers[item.path]
            elif item.kind in (InputKind.CONSTANT, InputKind.ATTRIBUTE):
                constants[item.path] = item.value.type.num_bytes
    whole_numbers = [item for item in training.model.buffers() if not item.dtype.is_floating_point]
    found[InputKind.BUFFER].update((id(item), item) for item in whole_numbers)
    gradients = sum(item.nbytes for item in owned.values())
    shards = training.shards
    assert shards is not None
    held = {
        "parameters": sum(item.nbytes for item in found[InputKind.PARAMETER].values()),
        "buffers": sum(item.nbytes for item in found[InputKind.BUFFER].values()),
        "batch": sum(tensor.nbytes for _, tensor in tensors_in(part)),
        "constants": sum(constants.values()),
        "optimizer state": _state_bytes(training, list(owned.values())),
        "sums over shards": num_waiting * gradients,
        "gradients": 0 if training.updates_inside else gradients,
        "gradient norms": sum(tensor.nbytes for tensor in training.norm_tensors()),
        "masks": sum(tensor.nbytes for tensor in training.mask_tensors()),
        "records of shards": shards.shards.tree.num_shards * sum(map(_record_bytes, _one_each(programs))),
        # A shard whose work is done waits until what it sent has left, with its loss and what it returns.
        "losses of stages": 2
        * shards.shards.tree.num_shards
        * sum(program.outputs[0].type.num_bytes for program in _one_each(programs)),
        "generator states": GENERATOR_STATE_BYTES * max(len(generators_of(item.nodes)) for item in programs.values()),
    }
    return {name: size for name, size in held.items() if size}


def _updated(program: Program) -> set[str]:
    """The names of the parameters whose gradients a Program makes."""
    return {str(node.args[1]) for node in program.nodes if node.name == "keep_gradient"} | {
        str(node.args[2]) for node in program.nodes if node.name.startswith("add_gradients")
    }


def _one_each(programs: Mapping[Kind, Program]) -> list[Program]:
    """One Program of each stage."""
    return list({kind.stage: program for kind, program in programs.items()}.values())


def _record_bytes(program: Program) -> int:
    (record,) = (node for node in program.nodes if node.operation is KEEP_RECORD)
    _, loss, _, _, *statistics = record.args
    return sum(value.type.num_bytes for value in (loss, *statistics))


def _state_bytes(training: Training, owned: Sequence[torch.nn.Parameter]) -> int:
    """The optimizer's state of the parameters that a rank updates, whatever is there of others."""
    if training.optimizer is None:
        return 0
    bare = copy.copy(training.optimizer)
    bare.state = defaultdict(dict)
    return count_optimizer_state(bare, owned).num_bytes or 0


def memory_of(plans: Sequence[Plan]) -> StageMemory:
    """What a stage takes, by the plans of its kinds of shards."""
    rows = []
    for plan in plans:
        held, handed_bytes = sum(plan.held.values()), 0
        pauses: list[int] = []
        ends = {item.value for item in plan.program.gradients}
        for node, size in zip(plan.nodes, plan.live_bytes, strict=True):
            if node.operation.hands_over is not None and (value := node.args[node.operation.hands_over]) in ends:
                handed_bytes += value.type.allocated_bytes  # from here on it is a sum, or belongs to one
            if node.operation.pauses:
                pauses.append(size - held - handed_bytes)
        rows.append((max(plan.live_bytes) - held, pauses))
    kept = tuple(map(max, zip(*(pauses for _, pauses in rows), strict=True)))
    return StageMemory(max(most for most, _ in rows), kept[:-1], kept[-1])


def held_by(
    held: Mapping[str, int], schedule: Schedule, rank: int, routes: Routes, stages: Mapping[int, StageMemory]
) -> dict[int, dict[str, int]]:
    """What is held while a stage's pieces run, what other shards keep included."""
    arriving = most_arriving_bytes(schedule, rank, routes)
    others = others_in_flight(schedule, rank, stages)
    return {
        stage: {**held, **{name: size for name, size in more.items() if size}}
        for stage in stages
        for more in [{IN_FLIGHT: others[stage], ON_THEIR_WAY: arriving}]
    }


def plan_as_derived(
    programs: Mapping[Kind, Program],
    held: Mapping[str, int],
    schedule: Schedule,
    rank: int,
    routes: Routes,
    terms: Terms,
) -> dict[Kind, Plan]:
    """The plans of a rank without a budget: operations run as they were derived."""
    plans = {kind: make_plan(program, held=held, table=terms.table) for kind, program in programs.items()}
    more = held_by(held, schedule, rank, routes, _by_stage(plans))
    return {kind: make_plan(program, held=more[kind.stage], table=terms.table) for kind, program in programs.items()}


def plan_within(
    programs: Mapping[Kind, Program],
    held: Mapping[str, int],
    schedule: Schedule,
    rank: int,
    routes: Routes,
    terms: Terms,
    live_of: Callable[[Kind], Mapping[str, object]],
) -> dict[Kind, Plan]:
    """The plans of a rank whose peak keeps to the budget; raises InfeasibleBudget."""
    compile_apart()
    planners = {kind: _make_planner(program, held, terms, live_of(kind)) for kind, program in programs.items()}
    points = {kind: list(reversed(planner.curve.points)) for kind, planner in planners.items()}
    plans = {kind: planner.realise(points[kind].pop(0), None) for kind, planner in planners.items()}
    chosen = {kind: planner.curve.points[-1] for kind, planner in planners.items()}
    budget_bytes = terms.budget_bytes
    assert budget_bytes is not None
    total = sum(held.values()) + most_arriving_bytes(schedule, rank, routes)
    least: tuple[int, dict[Kind, Plan]] = 2**62, plans
    while (peak := rank_peak(schedule, rank, _by_stage(plans), total)) > budget_bytes:
        least = min(least, (peak, dict(plans)), key=lambda pair: pair[0])
        left = [kind for kind in plans if points[kind]]
        if not left:
            raise _refuse(least[0], budget_bytes, rank, list(least[1].items()))
        kind = max(left, key=lambda item: _weight(plans[item]))
        chosen[kind] = points[kind].pop(0)
        plans[kind] = planners[kind].realise(chosen[kind], None)
    more = held_by(held, schedule, rank, routes, _by_stage(plans))
    found = {}
    for kind, planner in planners.items():
        planner = replace(planner, held=more[kind.stage])
        found[kind] = planner.realise(chosen[kind], budget_bytes)
    return found


def _weight(plan: Plan) -> int:
    memory = memory_of([plan])
    return memory.most_bytes + sum(memory.kept_bytes)


def _by_stage(plans: Mapping[Kind, Plan]) -> dict[int, StageMemory]:
    rows: dict[int, list[Plan]] = {}
    for kind, plan in plans.items():
        rows.setdefault(kind.stage, []).append(plan)
    return {stage: memory_of(items) for stage, items in rows.items()}


def _make_planner(program: Program, held: Mapping[str, int], terms: Terms, live: Mapping[str, object]) -> Planner:
    found = find_alternatives(program)
    nodes = [*program.nodes, *(alternative.node for alternative in found)]
    for node in nodes:
        if node.operation.compile is not None:
            node.operation.compile()
    return make_planner(
        program,
        found,
        find_costs(nodes, terms, live),
        held,
        has_measured_costs=terms.costs is CostSource.MEASURED,
        time_limit_s=terms.time_limit_s,
    )


def _refuse(least_bytes: int, budget_bytes: int, rank: int, plans: Sequence[tuple[Kind, Plan]]) -> InfeasibleBudget:
    kind, plan = max(plans, key=lambda pair: _weight(pair[1]))
    parts = tuple(plan.held.items())
    breakdown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    message = (
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) cannot be met by rank {rank} of a row with "
        f"stage {kind.stage}: the least found is {format_bytes(least_bytes)} ({least_bytes} bytes), of which "
        f"{breakdown}"
    )
    return InfeasibleBudget(
        message,
        least_bytes,
        sum(plan.held.values()),
        None,
        budget_bytes=budget_bytes,
        at=f"stage {kind.stage}",
        parts=parts,
        ways=(),
        hints=("more stages", "more shards, which are smaller", "schedule 1f1b, which holds fewest shards at once"),
        least=plan,
    )
