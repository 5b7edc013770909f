"""Weights that an evaluation reads in another form than the user holds them in: made once, kept until they change.

`find_fixed` says which values are the same in every call; `hold_prepared` moves what is made of them in front of the
Program. In: the Program of an evaluation. Out: one that reads prepared weights as inputs, with the Program that makes
these inside. EXACT: the same operations on the same numbers, once instead of in every call.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import Input, InputKind, Node, Program, Value
from undertow.ops.cleaning import remove_unused
from undertow.ops.own import OwnOperation, is_view, overwrites


def find_fixed(program: Program) -> set[Value]:
    """Parameters, buffers and what is prepared or viewed of them; none where there is a backward pass."""
    if program.backward_nodes:
        return set()
    changed = {update.input for update in program.updates}
    changed.update(value for node in program.nodes for value in overwrites(node))
    fixed = {
        item.value
        for item in program.inputs
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER) and item.value not in changed
    }
    for node in program.nodes:
        if (is_preparation(node) or is_view(node.target)) and node.inputs and fixed.issuperset(node.inputs):
            fixed.update(node.kept_outputs)
    return fixed


def is_preparation(node: Node) -> bool:
    """Whether the node brings weights into another form."""
    return isinstance(node.target, OwnOperation) and node.target.is_preparation


def hold_prepared(program: Program) -> Program:
    """The Program with its preparations moved to `preparation`, and what they make among its inputs."""
    fixed = find_fixed(program)
    moved = [node for node in program.nodes if is_preparation(node) and fixed.issuperset(node.inputs)]
    if not moved:
        return program
    rest = tuple(node for node in program.nodes if node not in moved)
    read = {value for node in rest for value in node.inputs}
    prepared = [value for node in moved for value in node.kept_outputs if value in read]
    views = [node for node in program.nodes if is_view(node.target) and fixed.issuperset(node.inputs)]
    places = {node: place for place, node in enumerate(program.nodes)}
    making = remove_unused(
        Program(
            inputs=program.inputs,
            nodes=tuple(sorted((*moved, *views), key=places.__getitem__)),
            outputs=tuple(prepared),
            num_forward_nodes=len(moved) + len(views),
        )
    )
    inputs = (*program.inputs, *(Input(value, InputKind.PREPARED, value.name) for value in prepared))
    return remove_unused(replace(program, inputs=inputs, nodes=rest, num_forward_nodes=len(rest), preparation=making))
