"""`undo_views`: a view that equals the tensor that it was made from is replaced by that tensor.

EXACT. The derivative of a linear layer transposes what the layer transposed, and its weight's gradient twice; each
takes a call at every step. A view that shows every element, with the sizes and strides of the tensor that it was made
from, is that tensor. Outputs stay as they are: the user gets a view where eager gives one.
"""

from __future__ import annotations

import torch

from undertow.ir import Node, Program, Value
from undertow.ir.cleaning import remove_unused

_FREE_OFFSET = {torch.ops.aten.as_strided.default}  # may begin elsewhere with as many elements


def undo_views(program: Program) -> Program:
    """The Program in which readers of such a view read the tensor itself."""
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
        # A gradient is handed over to the user: it must not lie in an input's memory.
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
