"""`forget_shape_only_reads`: an argument of which a kernel reads only the shape need not be kept.

EXACT. Eager keeps the input of every pooling layer for its shape. The pass is only for the CPU, where the kernels were
seen not to read the elements; CUDA's kernels first copy an argument that is not contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Node, Program, TensorType, Value
from undertow.ops.own import BLANK


def forget_shape_only_reads(program: Program) -> Program:
    """The Program with a blank of the same shape wherever only the shape is read."""
    return program.map_nodes(lambda node: _with_blank(node, program.positions[node]))


def _with_blank(node: Node, position: int) -> tuple[Node, ...]:
    place = node.operation.shape_only
    argument = node.args[place] if place is not None else None
    if place is None or not isinstance(argument, Value) or not _can_be_blank(argument.type):
        return (node,)
    blank = _blank_like(argument, node, position)
    return blank, replace(node, args=(*node.args[:place], blank.outputs[0], *node.args[place + 1 :]))


def _can_be_blank(kind: Any) -> bool:
    return isinstance(kind, TensorType) and kind.device.type == "cpu" and kind.is_contiguous and kind.num_elements > 0


def _blank_like(argument: Value, node: Node, position: int) -> Node:
    kind = argument.tensor_type
    blank = Value(f"blank_{position}", replace(kind, strides=(0,) * len(kind.shape)))
    device = torch.device(kind.device)
    return Node(BLANK, (kind.shape, kind.dtype, device), {}, (blank,), node.origin, node.phase)
