"""Which values of a step may lie in the arena: their makers can be told where to write, and the step frees them.

In: a Program and its lifetimes. Out: the roots that can be placed, and the workspace that is assumed for kernels that
nobody has measured. The record of an operation says whether it can be told where to write.
"""

from __future__ import annotations

from undertow.ir import Node, Program, Value
from undertow.memory.lifetimes import Lifetimes, is_dense

# Smaller values are left to the allocator, which is faster for them than one more argument.
FEWEST_BYTES = 1 << 16


def find_movable(program: Program, lifetimes: Lifetimes) -> set[Value]:
    """The roots that a plan may place: made and freed in one call, by operations that can be told where to write."""
    if program.cotangents:  # between the two passes anything may run, another forward pass among them
        return set()
    if any(node.operation.pauses for node in program.nodes):  # where it pauses, other shards run
        return set()
    # Custom Functions may keep references to what they read, and a gradient that is handed over is the user's.
    referenced = {
        lifetimes.root[value]
        for node in program.nodes
        if not node.operation.releases_arguments
        for value in lifetimes.read_by(node)
    }
    return {
        root
        for node in program.nodes
        if _can_be_told(node)
        for root in node.named_outputs
        if root in lifetimes.born
        and lifetimes.last_use[root] < len(program.nodes)
        and root not in referenced
        and _is_placeable(root)
    }


def _can_be_told(node: Node) -> bool:
    destination = node.operation.destination
    if destination is None or not destination.fits(node):
        return False
    return destination.takes_some or None not in node.outputs


def _is_placeable(value: Value) -> bool:
    if not is_dense(value):
        return False
    kind = value.tensor_type
    return kind.device.type == "cpu" and not kind.dtype.is_complex and kind.num_bytes >= FEWEST_BYTES


def assumed_workspace(node: Node) -> int:
    """The workspace of a kernel that nobody has measured: oneDNN may copy what it reads and what it makes."""
    if node.operation.assumed_workspace is not None:
        return node.operation.assumed_workspace(node)
    if node.shared_input is not None or (node.operation.is_fresh and node.operation.destination is not None):
        return 0
    return sum(value.type.num_bytes for value in (*node.inputs, *node.named_outputs))
