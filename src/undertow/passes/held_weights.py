"""Weights that an evaluation reads in another form than the user's: made once, and held until the weights change.

`find_fixed` says which values are the same in every call. `hold_prepared` moves what is made from them into the
Program's preparation. In: the Program of an evaluation. Out: one that reads prepared weights as inputs, and has the
Program that makes them as its `preparation`. EXACT: the same operations on the same numbers, but only once.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import Input, InputKind, Program, Value
from undertow.ir.cleaning import remove_unused


def find_fixed(program: Program) -> set[Value]:
    """Parameters, buffers, and what is prepared from them or views them; none where there is a backward pass."""
    if program.backward_start < len(program.nodes):
        return set()
    changed = {update.input for update in program.updates}
    changed.update(value for node in program.nodes for value in node.operation.writes(node))
    fixed = {
        item.value
        for item in program.inputs
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER) and item.value not in changed
    }
    for node in program.nodes:
        is_kept = node.operation.is_preparation or node.operation.is_view
        if is_kept and node.inputs and fixed.issuperset(node.inputs):
            fixed.update(node.named_outputs)
    return fixed


def hold_prepared(program: Program) -> Program:
    """The Program with its preparations moved to `preparation`, and what they make among its inputs."""
    fixed = find_fixed(program)
    moved = [node for node in program.nodes if node.operation.is_preparation and fixed.issuperset(node.inputs)]
    if not moved:
        return program
    rest = tuple(node for node in program.nodes if node not in moved)
    read = {value for node in rest for value in node.inputs}
    prepared = [value for node in moved for value in node.named_outputs if value in read]
    views = [node for node in program.nodes if node.operation.is_view and fixed.issuperset(node.inputs)]
    making = remove_unused(
        Program(
            inputs=tuple(item for item in program.inputs if item.value in fixed),
            nodes=tuple(sorted((*moved, *views), key=program.positions.__getitem__)),
            outputs=tuple(prepared),
            boundary=len(moved) + len(views),
        )
    )
    inputs = (*program.inputs, *(Input(value, InputKind.PREPARED, value.name) for value in prepared))
    return remove_unused(replace(program, inputs=inputs, nodes=rest, boundary=len(rest), preparation=making))
