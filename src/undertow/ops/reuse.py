"""`reuse_dead_inputs`: an elementwise operation writes over its first argument where nothing reads that again.

EXACT: the same kernel computes the same elements. It restores the in-place operations that capture made functional,
and finds more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._ops import OpOverload

from undertow.ir import Node, Program, Value
from undertow.ops.lifetimes import Lifetimes, find_lifetimes, is_dense
from undertow.ops.own import Mutating
from undertow.ops.schema import inplace_of, schema_of


def reuse_dead_inputs(program: Program) -> Program:
    """The Program with in-place operations wherever their argument's memory is free to take the result."""
    nodes = list(program.nodes)
    lifetimes = find_lifetimes(program)
    for index, node in enumerate(nodes):
        target = _reusing_target(node, index, lifetimes)
        if target is not None:
            nodes[index] = replace(node, target=target)
    return replace(program, nodes=tuple(nodes))


def inplace_target(node: Node) -> OpOverload | None:
    """The operation that writes the node's result over its first argument; None if there is none of the same type."""
    if len(node.outputs) != 1 or not node.args:
        return None
    if isinstance(node.target, Mutating):
        target = node.target.target if schema_of(node.target.target).is_inplace else None
    elif isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        # In-place products of complex numbers with strides take another kernel, with other last bits.
        is_complex = any(value.tensor_type.dtype.is_complex for value in node.inputs)
        target = None if is_complex else inplace_of(node.target)
    else:
        target = None
    argument, result = node.args[0], node.outputs[0]
    if not isinstance(argument, Value) or result is None or argument.type != result.type:
        return None
    return target


def _reusing_target(node: Node, index: int, lifetimes: Lifetimes) -> OpOverload | None:
    target = inplace_target(node)
    if target is None:
        return None
    argument = node.args[0]
    root = lifetimes.root[argument]
    if not is_dense(root) or root not in lifetimes.owned or not lifetimes.is_dead_after(argument, index):
        return None
    if sum(lifetimes.root[value] is root for value in node.inputs) > 1:
        return None
    return target
