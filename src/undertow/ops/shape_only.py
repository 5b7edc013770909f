"""`forget_shape_only_reads`: what a kernel asks of an argument is at times its shape alone; then it need not be kept.

EXACT. Eager keeps the input of every pooling layer for this, as large as an activation. Only on the CPU, where the
kernels were seen to leave the elements alone; CUDA's copy the argument first if it is not contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Node, Program, TensorType, Value
from undertow.ops.own import BLANK

_SHAPE_ONLY: dict[Any, int] = {}


def register_shape_only(target: Any, argument: str) -> None:
    """`target` reads nothing of its `argument` but the shape."""
    _SHAPE_ONLY[target] = [item.name for item in target._schema.arguments].index(argument)


def shape_only_readers() -> dict[Any, int]:
    """Operations, and the position of the argument of which they read the shape only."""
    return dict(_SHAPE_ONLY)


def forget_shape_only_reads(program: Program) -> Program:
    """The Program with a blank of the same shape wherever only the shape is read."""
    nodes: list[Node] = []
    num_forward = program.num_forward_nodes
    for position, node in enumerate(program.nodes):
        place = _SHAPE_ONLY.get(node.target)
        argument = node.args[place] if place is not None else None
        if isinstance(argument, Value) and _can_be_blank(argument.type):
            assert place is not None
            blank = _blank_like(argument, node, position)
            nodes.append(blank)
            num_forward += position < program.num_forward_nodes
            node = replace(node, args=(*node.args[:place], blank.outputs[0], *node.args[place + 1 :]))
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), num_forward_nodes=num_forward)


def _can_be_blank(kind: Any) -> bool:
    return isinstance(kind, TensorType) and kind.device.type == "cpu" and kind.is_contiguous and kind.num_elements > 0


def _blank_like(argument: Value, node: Node, position: int) -> Node:
    kind = argument.tensor_type
    blank = Value(f"blank_{position}", replace(kind, strides=(0,) * len(kind.shape)))
    device = torch.device(kind.device)
    return Node(BLANK, (kind.shape, kind.dtype, device), {}, (blank,), node.origin)
