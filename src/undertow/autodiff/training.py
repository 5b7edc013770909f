"""`add_updates`: a forward and backward pass, and what becomes of the gradients, as one Program.

In: a derived Program whose only cotangent is that of a scalar loss, and what is to be done with each gradient. Out: the
Program without cotangents: the loss's own is the number one, made where the backward pass begins, as `loss.backward()`
makes it. Each update stands where it can first run: its gradient complete, its parameter read for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Gradient, Node, Origin, Program, Value
from undertow.ir.types import contiguous_strides
from undertow.ops.lifetimes import find_lifetimes, is_dense
from undertow.ops.own import RESTRIDE

aten = torch.ops.aten


def add_updates(
    program: Program,
    update_of: Callable[[Gradient], Any],
    is_consumed: Callable[[Gradient], bool],
    at_end: Any | None = None,
) -> Program:
    """Append `update_of(gradient)`, an operation, for each gradient; a consumed one is gone after it.

    An operation that overwrites its parameter also gets the value that the forward pass itself gave to it, if any.
    `at_end` is an operation on all differentiated inputs and on the gradients that are not consumed: the last to run.
    """
    (seed,) = program.cotangents
    loss = next(value for value in program.outputs if value.name == seed.path)
    first = Node(aten.ones_like.default, (loss,), {}, (seed.value,), Origin())
    nodes = [*program.forward_nodes, first, *program.backward_nodes]
    gradients = [item for item in program.gradients if item.value is not None]
    updates: dict[int, list[Node]] = {}
    roots = find_lifetimes(replace(program, nodes=tuple(nodes), num_forward_nodes=len(nodes))).root
    ready = _find_ready(roots, nodes, gradients)
    delivered: set[Value] = set()
    for index, item in enumerate(gradients):
        assert item.value is not None
        copied = _copy_of(item, not is_consumed(item) and roots[item.value] in delivered)
        if copied is None:
            delivered.add(roots[item.value])
        else:
            updates.setdefault(ready[item.input], []).append(copied)
            gradients[index] = replace(item, value=copied.outputs[0])
    assigned = {update.input: update.value for update in program.updates}
    for item in gradients:
        target = update_of(item)
        args: Any = (item.value,)
        if hasattr(target, "overwrites"):
            args = (item.input, item.value, *([assigned.pop(item.input)] if item.input in assigned else []))
        updates.setdefault(ready[item.input], []).append(Node(target, args, {}, (), Origin(item.input.name)))
    woven: list[Node] = []
    for position, node in enumerate(nodes):
        woven += [node, *updates.get(position, ())]
    held = tuple(item for item in gradients if not is_consumed(item))
    if at_end is not None:
        written = tuple((item.input, assigned.pop(item.input)) for item in gradients if item.input in assigned)
        args = (tuple(item.input for item in gradients), tuple(item.value for item in held), written)
        woven.append(Node(at_end, args, {}, (), Origin()))
    return replace(
        program,
        nodes=tuple(woven),
        num_forward_nodes=len(woven),
        cotangents=(),
        gradients=held,
        updates=tuple(update for update in program.updates if update.input in assigned),
    )


def _copy_of(item: Gradient, is_shared: bool) -> Node | None:
    """A copy of a gradient in its input's layout, where autograd makes one.

    It does where the gradient lies otherwise, sizes of 1 aside, and where it is another input's gradient as well: what
    is done in place to one, such as clipping, must not reach the other.
    """
    assert item.value is not None
    kind = item.input.tensor_type
    if not is_dense(item.input):
        kind = replace(kind, strides=contiguous_strides(kind.shape))
    strides = zip(kind.shape, kind.strides, item.value.tensor_type.strides, strict=True)
    lies_otherwise = any(size > 1 and wanted != found for size, wanted, found in strides)
    if not lies_otherwise and not is_shared:
        return None
    value = Value(f"{item.value.name}_as_{item.input.name}", kind)
    return Node(RESTRIDE, (item.value, kind.strides), {}, (value,), Origin(item.input.name))


def _find_ready(roots: Mapping[Value, Value], nodes: Sequence[Node], gradients: Sequence[Gradient]) -> dict[Value, int]:
    """For each differentiated input, the last node that reads it or makes its gradient."""
    last_read: dict[Value, int] = {}
    made: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        for value in node.inputs:
            last_read[roots[value]] = position
        for value in node.kept_outputs:
            made[value] = position
    found = {}
    for item in gradients:
        assert item.value is not None
        found[item.input] = max(last_read.get(item.input, 0), made.get(item.value, 0))
    return found
