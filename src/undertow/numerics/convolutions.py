"""Other ways to run the convolutions of a Program: which algorithms could stand for a node, and what folds into them.

A choice is a node that makes the same outputs as the one it stands for, up to rounding (each algorithm states its
bound, see `kernels.convolution`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Node, Value
from undertow.ir.types import contiguous_strides
from undertow.kernels.convolution import ALGORITHMS, ConvolutionShape, PreparedAlgorithm, shape_from
from undertow.numerics.layout import is_channels_last, is_float_image
from undertow.ops.fast_convolution import (
    convolution_backward_by,
    convolution_by,
    convolution_weight_by,
    prepared_convolution_by,
    prepared_size,
)
from undertow.ops.onednn import CONVOLUTION, REORDER_CONVOLUTION, has_onednn

# The loops as written and im2col in one piece are there to be compared with; oneDNN's own is the node as it stands.
_NEVER_FASTEST = {"plain loops", "im2col", "direct (oneDNN)"}
CANDIDATES = tuple(item.name for item in ALGORITHMS if item.name not in _NEVER_FASTEST)
_FORWARD, _BACKWARD = (frozenset(map(make, CANDIDATES)) for make in (convolution_by, convolution_backward_by))
_PREPARED = {
    item.name: prepared_convolution_by(item.name) for item in ALGORITHMS if isinstance(item, PreparedAlgorithm)
}
# What a convolution from prepared weights makes needless where the weights are fixed.
PLAIN_FORM: dict[Any, Any] = {CONVOLUTION: torch.ops.aten.convolution.default} | {
    operation: convolution_by(name) for name, operation in _PREPARED.items()
}
_REFUSAL = {item.name: item.refusal for item in ALGORITHMS}


def convolution_choices(node: Node) -> list[Node]:
    """Ways to run a forward convolution, the given one first."""
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
    (y,) = node.outputs
    if is_transposed or y is None or not is_float_image(x, weight) or not is_channels_last(y.tensor_type):
        return []
    geometry = (*map(tuple, (stride, padding, dilation)), groups)
    own = [
        replace(node, operation=convolution_by(name), args=(x, weight, bias, *geometry, False), kwargs={})
        for name in _able(x, weight, *geometry)
    ]
    return [node, *own]


def prepared_convolution_choices(node: Node) -> dict[Node, Node]:
    """Ways to run a forward convolution from prepared weights, each with the node that prepares them."""
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
    (y,) = node.outputs
    if is_transposed or y is None or not is_float_image(x, weight) or not is_channels_last(y.tensor_type):
        return {}
    geometry = (*map(tuple, (stride, padding, dilation)), groups)
    x_shape, weight_shape = x.tensor_type.shape, weight.tensor_type.shape
    sizes = {
        name: prepared_size(name, shape_from(x_shape, weight_shape, *geometry))
        for name in _able(x, weight, *geometry)
        if name in _PREPARED
    }
    found = {}
    for name, size in sizes.items():
        kind = replace(weight.tensor_type, shape=(size,), strides=(1,))
        prepared = Value(f"{y.name}_prepared", kind)
        preparation = replace(
            node,
            operation=convolution_weight_by(name),
            args=(weight, x_shape, *geometry),
            kwargs={},
            outputs=(prepared,),
        )
        args = (x, prepared, bias, weight_shape, *geometry, None, False)
        found[replace(node, operation=_PREPARED[name], args=args, kwargs={})] = preparation
    if has_onednn():
        prepared = Value(f"{y.name}_prepared", weight.tensor_type)
        preparation = replace(
            node, operation=REORDER_CONVOLUTION, args=(weight, x_shape, *geometry), kwargs={}, outputs=(prepared,)
        )
        args = (x, prepared, bias, *geometry, None, False)
        found[replace(node, operation=CONVOLUTION, args=args, kwargs={})] = preparation
    return found


def convolution_backward_choices(node: Node) -> list[Node]:
    """Ways to run both backward passes of a convolution, the given one first."""
    ct, x, weight, _, stride, padding, dilation, is_transposed, _, groups, wants = node.args
    ct_x, _, ct_bias = node.outputs
    if is_transposed or not is_float_image(x, weight) or (ct_bias is not None and node.outputs[1] is None):
        return []
    if ct_x is not None and not is_channels_last(ct_x.tensor_type):
        return []
    geometry = (*map(tuple, (stride, padding, dilation)), groups)
    given = tuple(value is not None for value in node.outputs)
    outputs = (ct_x, _contiguous(node.outputs[1]), ct_bias)
    args = (ct, x, weight, *geometry, given, None)
    own = [
        replace(node, operation=convolution_backward_by(name), args=args, kwargs={}, outputs=outputs)
        for name in _able(x, weight, *geometry)
    ]
    return [node, *own]


def with_relu(node: Node, result: Value) -> Node:
    """An own forward convolution that ends with the ReLU behind it."""
    return replace(node, args=(*node.args[:-1], True), outputs=(result,))


def with_mask(node: Node, ct: Value, y: Value) -> Node:
    """An own backward convolution that begins with the ReLU's: `y` is that ReLU's output."""
    return replace(node, args=(ct, *node.args[1:-1], y))


def is_own_forward(node: Node) -> bool:
    """Whether the node is one of the choices above."""
    return node.target in _FORWARD


def is_prepared(node: Node) -> bool:
    """Whether the node is a convolution from prepared weights; its last arguments are residual and ReLU."""
    return node.target is CONVOLUTION or node.target in _PREPARED.values()


def is_own_backward(node: Node) -> bool:
    """Whether the node is one of the choices above."""
    return node.target in _BACKWARD


def _contiguous(value: Value | None) -> Value | None:
    if value is None or value.tensor_type.is_contiguous:
        return value
    kind = value.tensor_type
    return Value(f"{value.name}_contiguous", replace(kind, strides=contiguous_strides(kind.shape)))


def _able(x: Value, weight: Value, stride: Any, padding: Any, dilation: Any, groups: int) -> list[str]:
    shape = shape_from(x.tensor_type.shape, weight.tensor_type.shape, stride, padding, dilation, groups)
    able = [name for name in CANDIDATES if _REFUSAL[name](shape) is None]
    return [name for name in able if _is_worth_timing(name, shape)]


def _is_worth_timing(name: str, shape: ConvolutionShape) -> bool:
    """Whether an algorithm was ever near the fastest at such shapes: timing all takes minutes on large images."""
    if name == "fft":
        return shape.num_taps >= 25
    if name == "winograd F(2x2,3x3)":  # 1.8 times the multiplications of F(4x4), less waste at the border
        return min(shape.out_size) < 8
    return True
