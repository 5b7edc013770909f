"""A training step of a batch in shards: what one shard does with its loss, its buffers and its gradients.

In: the forward pass of a shard; later the Program with its backward pass. Out: a Program that changes no buffer, keeps
the shard's record, weighs its loss by its share of the examples, and adds its gradients to those of other shards.

A buffer cannot be updated shard by shard, since the shards of other ranks come in between. So a batch normalisation is
given running statistics of zero and a momentum of 1: then its kernel returns the statistic of the shard. The buffers
are updated from the records of all shards, in their order. A forward pass that reads a buffer which it writes, in any
other way than batch normalisation and counters do, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir import Node, Origin, Phase, Program, Value
from undertow.ir.operation import Operation
from undertow.ir.program import Gradient, InputKind, Update
from undertow.ir.pytorch import operation_of
from undertow.ops.communication import Link
from undertow.ops.own_parts import OwnParts
from undertow.ops.shards import KEEP_GRADIENT, KEEP_RECORD, SHARDS, SHARE, USE_RECORDS, Found, Shards, add_gradients
from undertow.passes.gathering import describe_buckets, gather_parameters, keep_own_elements
from undertow.passes.own_parts import Updating, update_own_parts, wait_for_parameters
from undertow.passes.reduction import gather_records, plan_buckets, reduce_gradients
from undertow.passes.updates import Use
from undertow.ranks.tree import Span
from undertow.terms import Terms

aten = torch.ops.aten

SHARE_SEED = (SHARE, (SHARDS,))  # the cotangent of a shard's loss

_MOMENTUM = ("momentum", "exponential_average_factor")
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, eq=False)
class ShardPart:
    """The part of a step that runs one shard: the last of this rank's, or one before it."""

    shards: Shards
    is_last: bool
    link: Link | None = None  # to the other ranks
    is_staged: bool = False  # the Program is of one stage: what needs all gradients comes after all stages

    def add_up_gradients(self, program: Program, terms: Terms) -> Program:
        """The Program whose gradients are sums over all shards, with the records of all shards at its end."""
        program, blocks = add_up_gradients(program, len(self.shards.tree.blocks(self.shards.held)))
        if self.link is None:
            return program
        is_even = len(set(self.shards.shares)) == 1
        plan_buckets(program, blocks, self.link, terms, is_even)
        return gather_records(reduce_gradients(program, blocks, self.link, is_even), self.link)

    def read_parameters(self, program: Program) -> Program:
        """The Program that gathers divided parameters, and waits for others that may still be on their way."""
        if self.link is None or self.own is None:
            return program
        program = gather_parameters(program, self.link)
        return wait_for_parameters(program, self.link) if self.own.is_late else program

    def keep_own_elements(self, program: Program) -> Program:
        """The Program whose inputs are the elements that this rank keeps."""
        return program if self.link is None or self.own is None else keep_own_elements(program, self.link)

    def describe_buckets(self, program: Program) -> tuple[str, ...]:
        """Which parameters are divided, where some are."""
        return () if self.link is None or self.own is None else describe_buckets(program, self.link)

    def update_own_parts(self, program: Program, updating: Updating, terms: Terms) -> Program:
        """The same for a rank that updates its part alone: the gradients are used up."""
        assert self.link is not None
        program, blocks = add_up_gradients(program, len(self.shards.tree.blocks(self.shards.held)))
        plan_buckets(program, blocks, self.link, terms, False)
        return gather_records(update_own_parts(program, blocks, self.link, updating), self.link)

    @property
    def own(self) -> OwnParts | None:
        """Which elements each rank updates, where the optimizer's state is divided."""
        return None if self.link is None else self.link.own

    def use_records(self, program: Program) -> Program:
        """The Program that ends by bringing the buffers up to date, and returns the loss of the whole batch."""
        (record,) = (node for node in program.nodes if node.operation is KEEP_RECORD)
        loss, *others = program.outputs
        total = Value("loss_of_all_shards", loss.type)
        _, _, found, buffers, *_ = record.args
        node = Node(USE_RECORDS, (SHARDS, found, *buffers), {}, (total,), Origin(), Phase.UPDATE)
        nodes = (*program.nodes, node)
        return replace(program, nodes=nodes, boundary=len(nodes), outputs=(total, *others))

    def records_bytes(self, program: Program) -> int:
        """What the records of all shards take."""
        (record,) = (node for node in program.nodes if node.operation is KEEP_RECORD)
        _, loss, _, _, *statistics = record.args
        return self.shards.tree.num_shards * sum(value.tensor_type.num_bytes for value in (loss, *statistics))

    def waiting_bytes(self, parameters_bytes: int) -> int:
        """What the sums over earlier shards take, at most."""
        held, tree = self.shards.held, self.shards.tree
        if not self.is_last:
            return tree.most_partial_sums(held) * parameters_bytes
        return len(tree.blocks(Span(held.first, held.end - 1))) * parameters_bytes if len(held) > 1 else 0


@dataclass(frozen=True)
class BufferStep:
    """One step from a buffer to its new value: the node that reads one and makes the other, and what it found."""

    position: int
    node: Node
    before: Value  # what it read of the buffer
    found: Found
    statistic: Value | None = None


def take_out_buffers(program: Program) -> Program:
    """The forward pass without its updates of buffers, which go to the shard's record."""
    loss, buffers = program.outputs[0], tuple(update.input for update in program.updates)
    kept: list[Value] = []
    found: list[tuple[Any, ...]] = []
    changed: dict[int, dict[Value, Value]] = {}
    for update in program.updates:
        steps = _follow(program, update)
        found.append(tuple(_enter(step, kept).plain for step in steps))
        for step in steps:
            if step.found.momentum is not None:
                changed.setdefault(step.position, {})[step.before] = update.input
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        nodes += _without_history(node, changed[position]) if position in changed else [node]
    nodes.append(Node(KEEP_RECORD, (SHARDS, loss, tuple(found), buffers, *kept), {}, (), Origin()))
    return replace(program, nodes=tuple(nodes), boundary=len(nodes), updates=())


def _enter(step: BufferStep, kept: list[Value]) -> Found:
    """What a step found, with its place in the record: the loss comes first there."""
    if step.statistic is None:
        return step.found
    kept.append(step.statistic)
    return replace(step.found, place=len(kept))


def _follow(program: Program, update: Update) -> list[BufferStep]:
    """From the buffer to its new value, step by step; raises CaptureError where the forward pass reads it otherwise."""
    kinds = {item.value: item.kind for item in program.inputs}
    if kinds[update.input] is not InputKind.BUFFER:
        kind = kinds[update.input].value
        raise CaptureError(
            f"the forward pass writes the {kind} {update.input.name} ({program.makers[update.value].origin}): shards "
            f"of a batch that are computed alone cannot do that; train without shards, or write it after the step"
        )
    steps: list[BufferStep] = []
    value = update.value
    while value is not update.input:
        step = _find_step(program, value)
        if step is None:
            break
        steps.insert(0, step)
        value = step.before
    if value is not update.input:  # made without the buffer: the last shard's is what stays
        steps = [BufferStep(-1, program.makers[update.value], update.input, Found(), update.value)]
    read = {update.input, *(step.before for step in steps)}
    positions = {step.position for step in steps}
    for other in read:
        readers = [place for place in program.readers.get(other, ()) if place not in positions and place >= 0]
        if readers:
            node = program.nodes[readers[0]]
            raise CaptureError(
                f"the forward pass reads the buffer {update.input.name} and writes it ({node.name} {node.origin}): "
                f"shards of a batch that are computed alone cannot do that; train without shards, or do not read it"
            )
    return steps


def _find_step(program: Program, value: Value) -> BufferStep | None:
    """The node that makes a new value of a buffer from an earlier one, if it is a statistic or a count."""
    node = program.makers.get(value)
    if node is None:
        return None
    position = program.positions[node]
    if node.target is aten.add.Tensor and isinstance(node.args[0], Value) and isinstance(node.args[1], int | float):
        is_count = not node.kwargs and not node.args[0].tensor_type.dtype.is_floating_point
        return BufferStep(position, node, node.args[0], Found(number=node.args[1])) if is_count else None
    places = _statistics_of(node)
    if places is None:
        return None
    mutated, momentum = places
    outputs = dict(zip(node.outputs[len(node.outputs) - len(mutated) :], mutated, strict=True))
    before = node.args[outputs[value]] if value in outputs else None
    if not isinstance(before, Value) or not isinstance(node.args[momentum], float | int):
        return None
    return BufferStep(position, node, before, Found(momentum=float(node.args[momentum])), value)


def _statistics_of(node: Node) -> tuple[list[int], int] | None:
    """The positions of the running statistics among the arguments of a batch normalisation, and of the momentum."""
    inner = node.operation.functional_of
    if inner is None or inner.overload is None or node.kwargs:
        return None
    names = [argument.name for argument in inner.overload._schema.arguments][: len(node.args)]
    momentum = next((names.index(name) for name in _MOMENTUM if name in names), None)
    if momentum is None or any(name not in names for name in _STATISTICS):
        return None
    return [names.index(name) for name in _STATISTICS], momentum


def is_batch_norm(node: Node) -> bool:
    """Whether it is a batch normalisation that finds running statistics."""
    return _statistics_of(node) is not None


def _without_history(node: Node, buffers: Mapping[Value, Value]) -> list[Node]:
    """A batch normalisation whose new running statistics are those of its input."""
    places = _statistics_of(node)
    assert places is not None
    args, nodes = list(node.args), []
    for place in places[0]:
        before = node.args[place]
        zero = Value(f"{before.name}_zero_{node.named_outputs[0].name}", before.type)
        nodes.append(Node(operation_of(aten.zeros_like.default), (before,), {}, (zero,), node.origin))
        args[place] = zero
    args[places[1]] = 1.0
    return [*nodes, replace(node, args=tuple(args))]


def keep_use(gradient: Gradient) -> Use:
    """What is done with a gradient of a shard that is not the rank's last."""
    return Use(KEEP_GRADIENT, False, False, before=(SHARDS, gradient.input.name))


def add_up_gradients(program: Program, num_blocks: int) -> tuple[Program, dict[Value, tuple[Value, ...]]]:
    """The Program of a rank's last shard, whose gradients are sums over this rank's shards.

    Also, for each differentiated input, its sum over each block of shards; the last of them is its gradient now.
    """
    operation: Operation = add_gradients(num_blocks)
    after: dict[int, list[Node]] = {}
    gradients: list[Gradient] = []
    blocks: dict[Value, tuple[Value, ...]] = {}
    made = _find_makers(program)
    for item in program.gradients:
        if item.value is not None:
            names = [f"{item.input.name}_sum{'' if num_blocks == 1 else block}" for block in range(num_blocks)]
            sums = tuple(Value(name, item.value.type) for name in names)
            args = (item.value, SHARDS, item.input.name, item.input)
            node = Node(operation, args, {}, sums, Origin(item.input.name), Phase.BACKWARD)
            after.setdefault(made[item.value], []).append(node)
            blocks[item.input] = sums
            item = replace(item, value=sums[-1])
        gradients.append(item)
    nodes: list[Node] = list(program.first_pass) + after.get(program.boundary - 1, [])
    for position, node in enumerate(program.second_pass, start=program.boundary):
        nodes += [node, *after.get(position, ())]
    return replace(program, nodes=tuple(nodes), gradients=tuple(gradients)), blocks


def _find_makers(program: Program) -> dict[Value, int]:
    """Where each gradient is there: after its maker, and not before the second pass."""
    start = program.boundary - 1
    found: dict[Value, int] = {}
    for item in program.gradients:
        if item.value is not None:
            maker = program.makers.get(item.value)
            found[item.value] = start if maker is None else max(program.positions[maker], start)
    return found
