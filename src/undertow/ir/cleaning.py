"""`remove_unused`: drops nodes that nobody reads, and inputs that nothing depends on. EXACT: draws and guards stay, and
arguments that were dropped are listed in `unread`.

`forget_unread`: outputs that nobody reads lose their names, so that other operations may stand for their makers.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import InputKind, Node, Program, Value


def remove_unused(program: Program) -> Program:
    """The Program without nodes and inputs on which no output, update, gradient or effect depends."""
    needed: set[Value] = set(program.ends)
    needed.update(update.input for update in program.updates)
    needed.update(gradient.input for gradient in program.gradients)
    kept: list[Node] = []
    boundary = 0
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        if node.operation.must_run or any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
            boundary += index < program.boundary
    kept.reverse()
    alive = needed | {value for node in kept for value in node.named_outputs}
    dropped = [item for item in program.inputs if item.value not in needed]
    return replace(
        program,
        inputs=tuple(item for item in program.inputs if item.value in needed),
        unread=(*program.unread, *(item for item in dropped if item.kind is InputKind.ARGUMENT)),
        nodes=tuple(kept),
        boundary=boundary,
        differentiable=frozenset(value for value in program.differentiable if value in alive),
    )


def forget_unread(program: Program) -> Program:
    """The Program whose nodes name only those outputs that something reads."""
    read = program.readers
    nodes = tuple(
        replace(node, outputs=tuple(value if value in read else None for value in node.outputs))
        for node in program.nodes
    )
    return replace(program, nodes=nodes)
