"""`fold_batch_norms`: batch normalisation by running statistics becomes part of the convolution before it.

In: the Program of an evaluation, in which outputs that nobody reads have no name. Out: the Program without batch
normalisations that are the only reader of a convolution. Such a convolution gets other weights, which extra operations
make from the parameters of both. REORDERS: the scale is applied to the weights instead of the sums, so each weight is
rounded once, and the result is not rounded again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.fast.normalization import FOLD_BIAS, FOLD_WEIGHT
from undertow.ir import Node, Program, Value
from undertow.ir.types import contiguous_strides

aten = torch.ops.aten


def fold_batch_norms(program: Program) -> Program:
    """The Program without the batch normalisations that can be folded."""
    makers = {value: place for place, node in enumerate(program.nodes) for value in node.named_outputs}
    readers = program.readers
    nodes: list[tuple[Node, ...]] = [(node,) for node in program.nodes]
    for place, node in enumerate(program.nodes):
        statistics = _statistics(node)
        if statistics is None or any(value is not None for value in node.outputs[1:]):
            continue
        before = node.args[0]
        convolution = program.nodes[makers[before]] if before in makers else None
        if convolution is not None and readers[before] == [place] and _can_fold(convolution, node):
            nodes[makers[before]], nodes[place] = (), _fold(convolution, node, *statistics)
    return program.with_pieces(nodes)


def _statistics(node: Node) -> tuple[Any, ...] | None:
    """Weight, bias, running mean, running variance and epsilon, if the node normalises by the latter two."""
    if node.target is aten._native_batch_norm_legit_no_training.default:
        _, weight, bias, mean, variance, _, epsilon = node.args
    elif node.target is aten.native_batch_norm.default and not node.args[5]:
        _, weight, bias, mean, variance, _, _, epsilon = node.args
    else:
        return None
    return weight, bias, mean, variance, epsilon


def _can_fold(convolution: Node, norm: Node) -> bool:
    if convolution.target is not aten.convolution.default:
        return False
    groups, is_transposed = convolution.args[8], convolution.args[6]
    tensors = (*convolution.inputs, *norm.inputs)
    is_float = all(value.tensor_type.dtype is torch.float32 for value in tensors)
    is_on_cpu = all(value.tensor_type.device.type == "cpu" for value in tensors)
    is_same = norm.named_outputs[0].type == convolution.named_outputs[0].type
    return is_float and is_on_cpu and is_same and not (is_transposed and groups > 1)


def _fold(
    convolution: Node, norm: Node, weight: Any, bias: Any, mean: Value, variance: Value, epsilon: float
) -> tuple[Node, ...]:
    old_weight, old_bias, is_transposed = convolution.args[1], convolution.args[2], convolution.args[6]
    result = norm.named_outputs[0]
    kind = old_weight.tensor_type
    new_weight = Value(f"{result.name}_weight", replace(kind, strides=contiguous_strides(kind.shape)))
    new_bias = Value(f"{result.name}_bias", mean.tensor_type)
    args = (old_weight, weight, variance, epsilon, 1 if is_transposed else 0)
    return (
        Node(FOLD_WEIGHT, args, {}, (new_weight,), norm.origin),
        Node(FOLD_BIAS, (old_bias, weight, bias, mean, variance, epsilon), {}, (new_bias,), norm.origin),
        replace(
            convolution, args=(convolution.args[0], new_weight, new_bias, *convolution.args[3:]), outputs=(result,)
        ),
    )
