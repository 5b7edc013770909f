"""`undo_views`: a view that leads back to a tensor that is there is that tensor.

EXACT. The derivative of a linear layer transposes what the layer transposed, and its weight's gradient twice; each
takes a call at every step. A view that keeps every element, with the sizes and strides of what it was made from, is
that very tensor. Outputs stay as they are: the user is given a view where eager gives one.
"""

from __future__ import annotations

import torch

from undertow.ir import Node, Program, Value
from undertow.ir.cleaning import remove_unused

_FREE_OFFSET = {torch.ops.aten.as_strided.default}  # may begin elsewhere with as many elements


def undo_views(program: Program) -> Program:
    """The Program in which whoever reads such a view reads the tensor itself."""
    inputs = {item.value for item in program.inputs} | {item.value for item in program.cotangents}
    outputs = {*program.outputs, *(update.value for update in program.updates)}
    ways: dict[Value, tuple[Value, ...]] = {}  # each view, and all that it was made from
    same: dict[Value, Value] = {}
    for node in program.nodes:
        if not _keeps_elements(node):
            continue
        view, source = node.named_outputs[0], node.inputs[0]
        ways[view] = (*ways.get(source, ()), source)
        found = next((value for value in ways[view] if value.type == view.type), None)
        if found is not None and view not in outputs:
            same[view] = found
    if not same:
        return program

    def read(value: Value) -> Value:
        return same.get(value, value)

    def end(value: Value) -> Value:
        # A gradient is handed over: an input's memory is not the step's to give.
        return value if value in outputs or read(value) in inputs else read(value)

    return remove_unused(program.map_nodes(lambda node: (node.with_values(read),)).with_ends(end))


def _keeps_elements(node: Node) -> bool:
    operation = node.operation
    if not operation.is_view or node.target in _FREE_OFFSET or len(node.outputs) != 1 or len(node.inputs) != 1:
        return False
    view, source = node.outputs[0], node.inputs[0]
    if view is None:
        return False
    made, given = view.tensor_type, source.tensor_type
    return made.dtype == given.dtype and made.num_elements == given.num_elements
