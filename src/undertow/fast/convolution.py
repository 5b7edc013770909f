"""Convolutions by Undertow's own algorithms: the operations, the nodes they may replace, and what folds into them.

A choice makes the same outputs as the node it replaces, up to rounding; each algorithm states its bound (see
`kernels.convolution`).

Each takes and makes channels_last activations; weights and their cotangents are contiguous. The workspace is allocated
for the call, so that it is measured and counted like any kernel's. In evaluation one operation can prepare the weights
and another can read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from undertow.alternatives.registry import PACK_SIGNS, Code, packed_type, register_code, register_parts
from undertow.fast.images import is_channels_last, is_float_image
from undertow.fast.onednn import CONVOLUTION, REORDER_CONVOLUTION, has_onednn
from undertow.fast.registry import is_plain_form, prepared_for, stands_for
from undertow.ir import Node, Value
from undertow.ir.operation import Operation, operation_maker
from undertow.ir.types import contiguous_strides
from undertow.kernels.convolution import (
    ALGORITHMS,
    Algorithm,
    ConvolutionShape,
    Pass,
    PreparedAlgorithm,
    shape_from,
    shape_of,
)
from undertow.kernels.outputs import Out, given
from undertow.ops.own import kernel

Pair = tuple[int, int]
_BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}


@operation_maker
def convolution_by(name: str) -> Operation:
    """The forward pass by an algorithm: (x, weight, bias, stride, padding, dilation, groups, has_relu) -> y."""
    operation = partial(_forward, _BY_NAME[name])
    return kernel(f"convolution.{_short(name)}", operation, writes_into=True, flops=_forward_flops)


@operation_maker
def convolution_backward_by(name: str) -> Operation:
    """Both backward passes: (ct, x, weight, stride, padding, dilation, groups, wants, y) -> ct_x, ct_weight, ct_bias.

    `wants` says which of the three; y, the output of the forward pass with its ReLU, masks the cotangent, or is None.
    """
    operation = partial(_backward, _BY_NAME[name])
    short = f"convolution_backward.{_short(name)}"
    return kernel(short, operation, returns_tuple=True, writes_into=True, flops=_backward_flops)


@operation_maker
def convolution_weight_by(name: str) -> Operation:
    """The weights as an algorithm reads them: (weight, sizes of x, stride, padding, dilation, groups) -> prepared."""
    operation = partial(_prepare, _prepared_algorithm(name))
    return kernel(f"convolution_weight.{_short(name)}", operation, is_preparation=True)


@operation_maker
def prepared_convolution_by(name: str) -> Operation:
    """The forward pass from prepared weights.

    (x, prepared, bias, sizes of the weights, stride, padding, dilation, groups, residual, has_relu) -> y
    """
    operation = partial(_evaluate, _prepared_algorithm(name))
    return kernel(f"convolution_prepared.{_short(name)}", operation, writes_into=True, flops=_evaluation_flops)


def prepared_size(name: str, shape: ConvolutionShape) -> int:
    """How many float32 numbers the prepared weights have."""
    return _prepared_algorithm(name).prepared_bytes(shape) // 4


def _prepared_algorithm(name: str) -> PreparedAlgorithm:
    algorithm = _BY_NAME[name]
    assert isinstance(algorithm, PreparedAlgorithm)
    return algorithm


def _prepare(
    algorithm: PreparedAlgorithm,
    weight: Tensor,
    x_shape: tuple[int, int, int, int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    shape = shape_from(x_shape, tuple(weight.shape), stride, padding, dilation, groups)
    prepared = torch.empty(algorithm.prepared_bytes(shape) // 4)
    algorithm.prepare(shape, weight.contiguous(), prepared)
    return prepared


def _evaluate(
    algorithm: PreparedAlgorithm,
    x: Tensor,
    prepared: Tensor,
    bias: Tensor | None,
    weight_shape: tuple[int, int, int, int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    residual: Tensor | None,
    has_relu: bool,
    out: Out = None,
) -> Tensor:
    shape = shape_from(tuple(x.shape), weight_shape, stride, padding, dilation, groups)
    x, residual = _images(x), _images(residual)
    y = given(out, 0, lambda: _empty_image(shape.out_shape))
    workspace = torch.empty(algorithm.evaluation_bytes(shape), dtype=torch.uint8)
    algorithm.evaluate(shape, x, prepared, y, workspace, bias=bias, residual=residual, has_relu=has_relu)
    return y


def _short(name: str) -> str:
    return name.lower().replace(" ", "_")


def _forward(
    algorithm: Algorithm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    has_relu: bool = False,
    out: Out = None,
) -> Tensor:
    shape = shape_of(x, weight, stride, padding, dilation, groups)
    x = _images(x)
    y = given(out, 0, lambda: _empty_image(shape.out_shape))
    workspace = algorithm.new_workspace(shape, Pass.FORWARD)
    algorithm.forward(shape, x, weight.contiguous(), y, workspace, bias=bias, has_relu=has_relu)
    return y


def _backward(
    algorithm: Algorithm,
    ct: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    wants: tuple[bool, bool, bool],
    y: Tensor | None = None,
    out: Out = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    shape = shape_of(x, weight, stride, padding, dilation, groups)
    ct, x, y = _images(ct), _images(x), _images(y)
    ct_x = given(out, 0, lambda: _empty_image(shape.x_shape)) if wants[0] else None
    ct_weight = given(out, 1, lambda: torch.empty(shape.weight_shape)) if wants[1] else None
    ct_bias = given(out, 2, lambda: torch.empty(shape.out_channels)) if wants[2] else None
    workspace = torch.empty(_backward_bytes(algorithm, shape, wants), dtype=torch.uint8)
    algorithm.backward(shape, ct, x, weight.contiguous(), ct_x, ct_weight, ct_bias, workspace, mask=y)
    return ct_x, ct_weight, ct_bias


def _backward_bytes(algorithm: Algorithm, shape: ConvolutionShape, wants: tuple[bool, bool, bool]) -> int:
    if wants[0] and (wants[1] or wants[2]):
        return algorithm.backward_bytes(shape)
    return algorithm.workspace_bytes(shape, Pass.BACKWARD_DATA if wants[0] else Pass.BACKWARD_WEIGHT)


# In each pass, every weight is multiplied once for every position of the output.
def _forward_flops(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> int:
    return shape_of(x, weight, *rest[:4]).flops


def _backward_flops(ct: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    wants = rest[4]
    return shape_of(x, weight, *rest[:4]).flops * sum(wants[:2])


def _evaluation_flops(x: Tensor, prepared: Tensor, bias: Tensor | None, *rest: Any) -> int:
    return shape_from(tuple(x.shape), *rest[:5]).flops


def _input_part_flops(ct: Tensor, weight: Tensor, x_shape: Any, *rest: Any) -> int:
    return shape_from(x_shape, tuple(weight.shape), *rest[:4]).flops


def _weight_part_flops(ct: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    return shape_of(x, weight, *rest[:4]).flops


@overload
def _images(tensor: Tensor) -> Tensor: ...
@overload
def _images(tensor: None) -> None: ...
def _images(tensor: Tensor | None) -> Tensor | None:
    """The tensor in channels_last, as the kernels read memory.

    A tensor of one channel has both layouts, and what PyTorch makes from it may have the other one. Signs, one bit per
    element, are no images and stay as they are.
    """
    if tensor is None or tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _empty_image(shape: tuple[int, int, int, int]) -> Tensor:
    return torch.empty(shape, memory_format=torch.channels_last)


@operation_maker
def convolution_input_part_by(name: str) -> Operation:
    """(ct, weight, sizes of x, stride, padding, dilation, groups, y) -> ct_x"""
    operation = partial(_input_part, _BY_NAME[name])
    short = f"convolution_backward_input.{_short(name)}"
    return kernel(short, operation, writes_into=True, flops=_input_part_flops)


@operation_maker
def convolution_weight_part_by(name: str) -> Operation:
    """(ct, x, weight, stride, padding, dilation, groups, wants_bias, y) -> ct_weight, ct_bias"""
    operation = partial(_weight_part, _BY_NAME[name])
    short = f"convolution_backward_weight.{_short(name)}"
    return kernel(short, operation, returns_tuple=True, writes_into=True, flops=_weight_part_flops)


def _input_part(algorithm: Algorithm, ct: Tensor, weight: Tensor, x_shape: Any, *rest: Any, out: Out = None) -> Tensor:
    *geometry, y = rest
    shape = shape_from(x_shape, tuple(weight.shape), *geometry)
    ct, y = _images(ct), _images(y)
    ct_x = given(out, 0, lambda: _empty_image(shape.x_shape))
    workspace = algorithm.new_workspace(shape, Pass.BACKWARD_DATA)
    algorithm.backward(shape, ct, None, weight.contiguous(), ct_x, None, None, workspace, mask=y)
    return ct_x


def _weight_part(
    algorithm: Algorithm, ct: Tensor, x: Tensor, weight: Tensor, *rest: Any, out: Out = None
) -> tuple[Tensor | None, ...]:
    stride, padding, dilation, groups, wants_bias, y = rest
    wants, out = (False, True, wants_bias), None if out is None else (None, *out)
    return _backward(algorithm, ct, x, weight, stride, padding, dilation, groups, wants, y, out)[1:]


def _parts(name: str, node: Node) -> Iterator[Node]:
    ct, x, weight, *geometry, _, y = node.args
    ct_x, ct_weight, ct_bias = node.outputs
    if ct_x is None or ct_weight is None:
        return
    args = (ct, x, weight, *geometry, ct_bias is not None, y)
    yield replace(node, operation=convolution_weight_part_by(name), args=args, outputs=(ct_weight, ct_bias))
    args = (ct, weight, x.tensor_type.shape, *geometry, y)
    yield replace(node, operation=convolution_input_part_by(name), args=args, outputs=(ct_x,))


@operation_maker
def convolution_backward_by_signs(name: str) -> Operation:
    """Like `convolution_backward_by`, with one bit per element of y instead of y."""
    return replace(convolution_backward_by(name), name=f"convolution_backward_by_signs.{_short(name)}")


def _readers_of_signs(name: str, node: Node, code: Value) -> Iterator[Node]:
    whole = replace(node, operation=convolution_backward_by_signs(name), args=(*node.args[:-1], code))
    yield whole
    yield from _parts(name, whole)


for _name in _BY_NAME:
    register_parts(convolution_backward_by(_name), partial(_parts, _name))
    _code = Code(lambda node: node.args[-1], packed_type, PACK_SIGNS, partial(_readers_of_signs, _name))
    register_code(convolution_backward_by(_name), _code)


# The plain loops and im2col in one piece are there for comparison; oneDNN's algorithm is the node itself.
_NEVER_FASTEST = {"plain loops", "im2col", "direct (oneDNN)"}
CANDIDATES = tuple(item.name for item in ALGORITHMS if item.name not in _NEVER_FASTEST)
_FORWARD, _BACKWARD = (frozenset(map(make, CANDIDATES)) for make in (convolution_by, convolution_backward_by))
_PREPARED = {
    item.name: prepared_convolution_by(item.name) for item in ALGORITHMS if isinstance(item, PreparedAlgorithm)
}
# Where the weights are fixed, the prepared form makes the plain one needless.
is_plain_form(torch.ops.aten.convolution.default, CONVOLUTION)
for _name, _operation in _PREPARED.items():
    is_plain_form(convolution_by(_name), _operation)
_REFUSAL = {item.name: item.refusal for item in ALGORITHMS}


@stands_for(torch.ops.aten.convolution.default)
def convolution_choices(node: Node) -> list[Node]:
    """Other ways to run a forward convolution."""
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
    (y,) = node.outputs
    if is_transposed or y is None or not is_float_image(x, weight) or not is_channels_last(y.tensor_type):
        return []
    geometry = (*map(tuple, (stride, padding, dilation)), groups)
    return [
        replace(node, operation=convolution_by(name), args=(x, weight, bias, *geometry, False), kwargs={})
        for name in _able(x, weight, *geometry)
    ]


@prepared_for(torch.ops.aten.convolution.default)
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


@stands_for(torch.ops.aten.convolution_backward.default)
def convolution_backward_choices(node: Node) -> list[Node]:
    """Other ways to run both backward passes of a convolution."""
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
    return [
        replace(node, operation=convolution_backward_by(name), args=args, kwargs={}, outputs=outputs)
        for name in _able(x, weight, *geometry)
    ]


def with_relu(node: Node, result: Value) -> Node:
    """One of the forward choices, ending with the ReLU after it."""
    return replace(node, args=(*node.args[:-1], True), outputs=(result,))


def with_mask(node: Node, ct: Value, y: Value) -> Node:
    """One of the backward choices, beginning with the backward pass of the ReLU whose output is `y`."""
    return replace(node, args=(ct, *node.args[1:-1], y))


def is_own_forward(node: Node) -> bool:
    """Whether the node is one of the forward choices."""
    return node.target in _FORWARD


def is_prepared(node: Node) -> bool:
    """Whether the node is a convolution from prepared weights; its last arguments are residual and ReLU."""
    return node.target is CONVOLUTION or node.target in _PREPARED.values()


def is_own_backward(node: Node) -> bool:
    """Whether the node is one of the backward choices."""
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
    """Whether an algorithm was ever near the fastest at such shapes. Timing all takes minutes on large images."""
    if name == "fft":
        return shape.num_taps >= 25
    if name == "winograd F(2x2,3x3)":  # 1.8 times the multiplications of F(4x4), less waste at the border
        return min(shape.out_size) < 8
    if name == "grouped":  # one group of many channels is a product
        return shape.groups > 1 or shape.in_channels <= 4
    return True
