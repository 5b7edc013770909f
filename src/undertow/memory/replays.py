"""What a forward pass has to save so that it can run again, for instance before a second backward pass."""

from __future__ import annotations

from undertow.ir import Program, Value


def find_replayed_updates(program: Program) -> list[Value]:
    """Updated inputs whose old value a second forward pass would need; it does not need running statistics."""
    needed = {value for node in program.second_pass for value in node.inputs}
    for node in reversed(program.first_pass):
        if node.operation.is_guard or any(value in needed for value in node.outputs):
            dropped = {node.args[place] for place in node.operation.droppable}
            needed.update(value for value in node.inputs if value not in dropped)
    return [update.input for update in program.updates if update.input in needed]
