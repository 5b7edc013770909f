"""`add_updates`: a forward pass, its backward pass, and what is done with the gradients, as one Program.

In: a derived Program whose only cotangent is a scalar loss's and whose gradients have the strides of their parameters,
and what to do with each gradient. Out: the Program without cotangents. The loss's own is the number one, made where the
backward pass begins, as in `loss.backward()`. Each update is at the first position where it can run: its gradient is
complete, and its parameter has been read for the last time. A shard's loss counts by its share instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.ir import Gradient, Node, Operation, Origin, Phase, Program, Value
from undertow.ir.pytorch import operation_of
from undertow.memory.lifetimes import find_lifetimes
from undertow.ops.row_gradients import ADD_ROWS
from undertow.passes.gradients import part_gradients

aten = torch.ops.aten

Seed = tuple[Operation, tuple[Any, ...]]  # called with the loss and these arguments
ONES: Seed = (operation_of(aten.ones_like.default), ())


@dataclass(frozen=True)
class Use:
    """What is done with a gradient: `operation(*before, input, gradient, *after)`; a consumed one is freed after it.

    `looked_at` is an operation on the input and the gradient that runs first, with what goes before these.
    `followed_by` runs after it in the gradient's chain, or after all updates where those come at the end.
    """

    operation: Operation
    is_consumed: bool
    overwrites: bool
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    looked_at: tuple[Operation, tuple[Any, ...]] | None = None
    followed_by: tuple[Operation, tuple[Any, ...]] | None = None
    chain: Sequence[Node] = ()  # the nodes that make a gradient in rows, where the operation does so itself


@dataclass(frozen=True)
class AtEnd:
    """What is done when all gradients are there: `operation(*before, inputs, gradients, assignments)`."""

    operation: Operation
    before: tuple[Any, ...]


def add_updates(
    program: Program,
    use_of: Callable[[Gradient], Use],
    at_end: AtEnd | None = None,
    seed_by: Seed = ONES,
) -> Program:
    """Append what `use_of(gradient)` says for each gradient. `seed_by` makes the cotangent of the loss.

    An operation that overwrites its parameter also gets the value that the forward pass itself gave to it, if any. One
    that updates rows gets what the gradient in rows is made from, and not the gradient.
    `at_end` is an operation on all differentiated inputs and on the gradients that are not consumed: the last to run.
    """
    program = seed_loss(part_gradients(program, lambda item: not use_of(item).is_consumed), seed_by)
    nodes = program.nodes
    gradients = [item for item in program.gradients if item.value is not None]
    updates: dict[int, list[Node]] = {}
    inside: set[Node] = set()  # what updates do themselves
    roots = find_lifetimes(replace(program, nodes=tuple(nodes), boundary=len(nodes))).root
    ready = _find_ready(roots, nodes, gradients)
    assigned = {update.input: update.value for update in program.updates}
    for item in gradients:
        use = use_of(item)
        given: Any = item.value
        if use.chain:
            given = tuple(node.args for node in use.chain if node.operation is not ADD_ROWS)
            inside.update(use.chain)
        args = (*use.before, item.input, given, *use.after)
        if use.overwrites and item.input in assigned:
            args = (*args, assigned.pop(item.input))
        origin, at_once = Origin(item.input.name), updates.setdefault(ready[item.input], [])
        if use.looked_at is not None:
            look, before = use.looked_at
            at_once.append(Node(look, (*before, item.input, item.value), {}, (), origin, Phase.UPDATE))
        at_once.append(Node(use.operation, args, {}, (), origin, Phase.UPDATE))
        if at_end is None:
            at_once += _following(item, use)
    woven: list[Node] = []
    for position, node in enumerate(nodes):
        woven += [*(() if node in inside else (node,)), *updates.get(position, ())]
    held = tuple(item for item in gradients if not use_of(item).is_consumed)
    if at_end is not None:
        written = tuple((item.input, assigned.pop(item.input)) for item in gradients if item.input in assigned)
        inputs, values = tuple(item.input for item in gradients), tuple(item.value for item in held)
        args = (*at_end.before, inputs, values, written)
        woven.append(Node(at_end.operation, args, {}, (), Origin(), Phase.UPDATE))
        woven += [node for item in gradients for node in _following(item, use_of(item))]
    return replace(
        program,
        nodes=tuple(woven),
        boundary=len(woven),
        gradients=held,
        updates=tuple(update for update in program.updates if update.input in assigned),
    )


def seed_loss(program: Program, seed_by: Seed) -> Program:
    """The Program that makes the cotangent of its loss itself; one that does so already stays as it is."""
    if not program.cotangents:
        return program
    (seed,) = program.cotangents
    loss = next(value for value in program.outputs if value.name == seed.path)
    first = Node(seed_by[0], (loss, *seed_by[1]), {}, (seed.value,), Origin(), Phase.BACKWARD)
    nodes = (*program.first_pass, first, *program.second_pass)
    return replace(program, nodes=nodes, cotangents=(), seed=seed.value)


def _following(item: Gradient, use: Use) -> list[Node]:
    if use.followed_by is None:
        return []
    operation, args = use.followed_by
    return [Node(operation, args, {}, (), Origin(item.input.name), Phase.UPDATE)]


def _find_ready(roots: Mapping[Value, Value], nodes: Sequence[Node], gradients: Sequence[Gradient]) -> dict[Value, int]:
    """For each differentiated input, the last node that reads it or makes its gradient."""
    last_read: dict[Value, int] = {}
    made: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        for value in node.inputs:
            last_read[roots[value]] = position
        for value in node.named_outputs:
            made[value] = position
    found = {}
    for item in gradients:
        assert item.value is not None
        found[item.input] = max(last_read.get(item.input, 0), made.get(item.value, 0))
    return found
