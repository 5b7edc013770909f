"""`remove_unused`: drops nodes nobody reads, and inputs nothing depends on. EXACT: random draws and guards stay.

`forget_unread`: outputs that nobody reads lose their names, so that other operations may stand for their makers.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import Node, Program, Value
from undertow.ops.own import has_effect


def remove_unused(program: Program) -> Program:
    """The Program without nodes and inputs that neither outputs, updates, gradients nor effects depend on."""
    needed: set[Value] = set(program.outputs)
    needed.update(update.value for update in program.updates)
    needed.update(update.input for update in program.updates)
    needed.update(gradient.value for gradient in program.gradients if gradient.value is not None)
    needed.update(gradient.input for gradient in program.gradients)
    kept: list[Node] = []
    num_forward = 0
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        if has_effect(node.target) or any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
            num_forward += index < program.num_forward_nodes
    kept.reverse()
    alive = needed | {value for node in kept for value in node.outputs if value is not None}
    return replace(
        program,
        inputs=tuple(item for item in program.inputs if item.value in needed),
        nodes=tuple(kept),
        num_forward_nodes=num_forward,
        differentiable=frozenset(value for value in program.differentiable if value in alive),
    )


def forget_unread(program: Program) -> Program:
    """The Program whose nodes name only those outputs that something reads."""
    read = {value for node in program.nodes for value in node.inputs}
    read.update(program.outputs, (update.value for update in program.updates))
    read.update(gradient.value for gradient in program.gradients if gradient.value is not None)
    nodes = tuple(
        replace(node, outputs=tuple(value if value in read else None for value in node.outputs))
        for node in program.nodes
    )
    return replace(program, nodes=nodes)
