"""Plans made by hand: a small network whose schedule recomputes, replays and encodes what the caller names."""

from collections.abc import Sequence

import torch
from torch import nn

from undertow.alternatives.registry import Role, find_alternatives
from undertow.autodiff.backward import differentiate
from undertow.costs.measuring import model_cost
from undertow.ir import InputKind, Outcome, Plan
from undertow.ir.cleaning import remove_unused
from undertow.memory.tables import make_plan
from undertow.passes.shape_only import forget_shape_only_reads
from undertow.planner.problem import Kind, Problem, make_problem
from undertow.planner.rebuild import rebuild
from undertow.record.capture import capture

HELD_KINDS = {InputKind.PARAMETER: "parameters", InputKind.BUFFER: "buffers", InputKind.ARGUMENT: "batch"}


def convnet(
    names: Sequence[str] = ("first", "sigmoid", "second", "relu", "pool", "dropout", "flatten", "head"),
) -> nn.Module:
    """Two convolutions, a pooling, dropout and a linear layer, under these names; an image of 3x16x16 goes in."""
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(512, 10),
    ]
    model = nn.Sequential()
    for name, layer in zip(names, layers, strict=True):
        model.add_module(name, layer)
    return model


def problem_of(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Problem:
    """The planning problem of a training step of `model`, with modelled costs."""
    program = capture(model.forward, args, {}, model).program
    inputs = {item.value for item in program.inputs}
    outputs = [value for value in program.outputs if value in program.differentiable and value not in inputs]
    wanted = [item.value for item in program.inputs if item.value in program.differentiable]
    step = remove_unused(forget_shape_only_reads(differentiate(program, outputs, wanted, is_strict=False)))
    return make_problem(step, find_alternatives(step), model_cost, sum(i.value.type.num_bytes for i in step.inputs))


def scheduled_plan(
    problem: Problem,
    *,
    recompute: Sequence[str] = (),
    encode: Sequence[str] = (),
    budget_bytes: int | None = None,
    **about: object,
) -> Plan:
    """The Plan in which the values named in `recompute` are made again just before the backward pass reads them, and
    those named in `encode` are held as codes from their last read in the forward pass on."""
    schedule = problem.instance.order.tolist()
    for name in encode:
        schedule = _encode(problem, schedule, name)
    for name in reversed(recompute):
        schedule = _recompute(problem, schedule, name)
    rebuilt = rebuild(problem, schedule)
    base = problem.program
    held = dict.fromkeys(HELD_KINDS.values(), 0)
    for item in base.inputs:
        held[HELD_KINDS[item.kind]] += item.value.type.num_bytes
    return make_plan(
        rebuilt.program,
        base=base,
        bases=rebuilt.bases,
        repeats=rebuilt.repeats,
        cost_of=model_cost,
        held=held | {"optimizer state": 2 * held["parameters"]},
        budget_bytes=budget_bytes,
        **{"outcome": Outcome.FEASIBLE, "has_measured_costs": True} | about,
    )


def _kind(problem: Problem, name: str, role: Role | None = None) -> int:
    """The kind that makes the value `name`, or an alternative of that node."""
    base = problem.program
    position = next(i for i, node in enumerate(base.nodes) if name in {v.name for v in node.named_outputs})
    return next(
        index
        for index, kind in enumerate(problem.kinds)
        if kind.node == position and (kind.alternative.role if kind.alternative is not None else None) is role
    )


def _recompute(problem: Problem, schedule: list[int], name: str) -> list[int]:
    first = _kind(problem, name)
    written = set(problem.instance.writes.row(first))
    boundary = schedule.index(problem.kinds.index(Kind(-1)))
    reader = next(
        place
        for place in range(boundary + 1, len(schedule))
        if written & set(problem.instance.reads.row(schedule[place]))
    )
    second = [i for i, k in enumerate(problem.kinds) if k.node == problem.kinds[first].node and k.alternative]
    runs = [i for i in second if problem.kinds[i].alternative.role is Role.SECOND_RUN] or [first]
    return [*schedule[:reader], runs[0], *schedule[reader:]]


def _encode(problem: Problem, schedule: list[int], name: str) -> list[int]:
    """The value's own codec if it has one, else the operation that can read its code."""
    value = next(v for node in problem.program.nodes for v in node.named_outputs if v.name == name)
    encode = next(
        index
        for index, kind in enumerate(problem.kinds)
        if kind.alternative is not None
        and kind.alternative.role is Role.ENCODE
        and kind.alternative.node.args[0] is value
    )
    node = problem.kinds[encode].node
    others = {
        kind.alternative.role: index
        for index, kind in enumerate(problem.kinds)
        if kind.node == node and kind.alternative is not None
    }
    read = set(problem.instance.reads.row(encode))
    boundary = schedule.index(problem.kinds.index(Kind(-1)))
    touching = [
        p for p, k in enumerate(schedule) if read & {*problem.instance.reads.row(k), *problem.instance.writes.row(k)}
    ]
    last_forward = max(place for place in touching if place < boundary)
    if Role.READ in others:
        reader = next(place for place, index in enumerate(schedule) if problem.kinds[index] == Kind(node))
        tail = [others[Role.READ], *schedule[reader + 1 :]]
    else:
        reader = min(place for place in touching if place > boundary)
        tail = [others[Role.DECODE], *schedule[reader:]]
    return [*schedule[: last_forward + 1], encode, *schedule[last_forward + 1 : reader], *tail]
