"""What has to be kept beside a forward pass so that it can run again: before a second backward pass, for instance."""

from __future__ import annotations

from undertow.ir import Program, Value


def find_replayed_updates(program: Program) -> list[Value]:
    """Updated inputs whose old value a second forward pass would need; batch normalisation's statistics are not."""
    needed = {value for node in program.second_pass for value in node.inputs}
    for node in reversed(program.first_pass):
        if node.operation.is_guard or any(value in needed for value in node.outputs):
            dropped = {node.args[place] for place in node.operation.droppable}
            needed.update(value for value in node.inputs if value not in dropped)
    return [update.input for update in program.updates if update.input in needed]
