"""`reuse_dead_inputs`: an elementwise operation writes over its first argument where nothing reads that later.

EXACT: the same kernel computes the same elements. The pass restores the in-place operations that capture made
functional, and finds more.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import Node, Operation, Program, TensorType, Value
from undertow.ir.pytorch import in_place_of
from undertow.memory.lifetimes import Lifetimes, find_lifetimes, is_dense


def reuse_dead_inputs(program: Program) -> Program:
    """The Program with in-place operations wherever nothing needs the argument's memory any more."""
    nodes = list(program.nodes)
    lifetimes = find_lifetimes(program)
    for index, node in enumerate(nodes):
        operation = _find_reuse(node, index, lifetimes)
        if operation is not None:
            nodes[index] = replace(node, operation=operation)
    return replace(program, nodes=tuple(nodes))


def in_place_operation(node: Node) -> Operation | None:
    """The operation that writes the node's result over its first argument; None if there is none of the same type."""
    if len(node.outputs) != 1 or not node.args:
        return None
    argument, result = node.args[0], node.outputs[0]
    if not isinstance(argument, Value) or result is None or argument.type != result.type:
        return None
    # In-place products of complex numbers with strides run another kernel, with other last bits.
    is_complex = any(isinstance(value.type, TensorType) and value.type.dtype.is_complex for value in node.inputs)
    if is_complex and node.operation.functional_of is None:
        return None
    return in_place_of(node.operation)


def _find_reuse(node: Node, index: int, lifetimes: Lifetimes) -> Operation | None:
    operation = in_place_operation(node)
    if operation is None:
        return None
    argument = node.args[0]
    root = lifetimes.root[argument]
    if not is_dense(root) or root not in lifetimes.owned or not lifetimes.is_dead_after(argument, index):
        return None
    if sum(lifetimes.root[value] is root for value in node.inputs) > 1:
        return None
    return operation
