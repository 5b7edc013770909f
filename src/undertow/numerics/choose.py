"""`choose_kernels`: the fastest measured way to run each operation, and elementwise operations folded into it.

In: a derived Program whose activations lie as `use_channels_last` put them, and a function that measures nodes. Out: a
Program with other operations for the same values. Choices are made per shape from the table of measured times, before
any budget is seen: the same table gives the same bits at every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Node, Origin, Program, Value, map_values
from undertow.ir.cost import Cost
from undertow.numerics.convolutions import (
    convolution_backward_choices,
    convolution_choices,
    is_own_backward,
    is_own_forward,
    with_mask,
    with_relu,
)
from undertow.ops.own import RESTRIDE

aten = torch.ops.aten

CostTable = Callable[[Sequence[Node]], Callable[[Node], Cost]]

_CHOICES: dict[Any, Callable[[Node], list[Node]]] = {
    aten.convolution.default: convolution_choices,
    aten.convolution_backward.default: convolution_backward_choices,
}


def choose_kernels(program: Program, measure: CostTable) -> Program:
    """The Program with the fastest kernel for each operation that has several."""
    choices = {
        position: [node, *found]
        for position, node in enumerate(program.nodes)
        if (found := _CHOICES.get(node.target, lambda node: [])(node))
    }
    if not choices:
        return program
    cost_of = measure([node for nodes in choices.values() for node in nodes])
    nodes = list(program.nodes)
    renamed: dict[Value, Value] = {}
    for position, candidates in choices.items():
        nodes[position] = min(candidates, key=lambda node: cost_of(node).duration_ns)
        for old, new in zip(candidates[0].outputs, nodes[position].outputs, strict=True):
            if old is not None and new is not None and old is not new:
                renamed[old] = new
    return _fold_relu(_rename(replace(program, nodes=tuple(nodes)), renamed))


def _rename(program: Program, renamed: dict[Value, Value]) -> Program:
    """The Program with values read under their new names."""

    def new(value: Value) -> Value:
        return renamed.get(value, value)

    nodes = tuple(
        replace(
            node,
            args=map_values(node.args, new),
            kwargs={name: map_values(item, new) for name, item in node.kwargs.items()},
        )
        for node in program.nodes
    )
    gradients = tuple(
        replace(item, value=None if item.value is None else new(item.value)) for item in program.gradients
    )
    return replace(program, nodes=nodes, gradients=gradients)


def lay_out_gradients(program: Program) -> Program:
    """Gradients as their parameters lie: a kernel's own layout is not for the user to see."""
    nodes = list(program.nodes)
    gradients = []
    for item in program.gradients:
        if item.value is not None and item.value.tensor_type.strides != item.input.tensor_type.strides:
            value = Value(f"{item.value.name}_as_{item.input.name}", item.input.tensor_type)
            nodes.append(Node(RESTRIDE, (item.value, value.tensor_type.strides), {}, (value,), Origin(item.input.name)))
            item = replace(item, value=value)
        gradients.append(item)
    return replace(program, nodes=tuple(nodes), gradients=tuple(gradients))


def _fold_relu(program: Program) -> Program:
    """A ReLU that alone reads a convolution becomes part of it, and so does its backward."""
    nodes: list[Node | None] = list(program.nodes)
    readers = _readers(program)
    maker = {value: position for position, node in enumerate(program.nodes) for value in node.kept_outputs}

    def made_for(value: Any, position: int) -> Node | None:
        """The node that makes `value`, if the node at `position` is its only reader."""
        is_only_reader = isinstance(value, Value) and readers.get(value) == [position] and value in maker
        return nodes[maker[value]] if is_only_reader else None

    for position, node in enumerate(program.nodes):
        if node.target is aten.relu.default:
            before = made_for(node.args[0], position)
            if before is not None and is_own_forward(before):
                nodes[maker[node.args[0]]] = with_relu(before, node.kept_outputs[0])
                nodes[position] = None
        elif is_own_backward(node):
            masked = made_for(node.args[0], position)
            if masked is not None and masked.target is aten.threshold_backward.default and masked.args[2] == 0:
                nodes[maker[node.args[0]]] = None
                nodes[position] = with_mask(node, masked.args[0], masked.args[1])
    return _without_gaps(program, nodes)


def _without_gaps(program: Program, nodes: list[Node | None]) -> Program:
    num_forward = sum(node is not None for node in nodes[: program.num_forward_nodes])
    return replace(program, nodes=tuple(node for node in nodes if node is not None), num_forward_nodes=num_forward)


def _readers(program: Program) -> dict[Value, list[int]]:
    """For each value the positions of the nodes that read it; whatever leaves the Program is read at -1."""
    readers: dict[Value, list[int]] = {}
    for position, node in enumerate(program.nodes):
        for value in dict.fromkeys(node.inputs):
            readers.setdefault(value, []).append(position)
    ends = [*program.outputs, *(update.value for update in program.updates)]
    ends += [gradient.value for gradient in program.gradients if gradient.value is not None]
    for value in ends:
        readers.setdefault(value, []).append(-1)
    return readers
