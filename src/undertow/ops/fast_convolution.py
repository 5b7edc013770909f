"""Undertow's convolution algorithms as operations of a Program.

Each takes and makes channels_last activations; weights and their cotangents are contiguous. The workspace is allocated
for the call, so that it is measured, and counted, like any kernel's. In evaluation the weights can be prepared by one
operation and read by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from undertow.ir import Node, Value
from undertow.ir.operation import Operation, operation_maker
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
from undertow.ops.alternatives import PACK_SIGNS, Code, packed_type, register_code, register_parts
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
    """How many float32 the prepared weights are."""
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


# Every weight meets every position of the output once, in each pass.
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
    """In channels_last, as the kernels read memory.

    A tensor of one channel lies in both layouts, and what PyTorch makes of it may come in the other one. Signs, one bit
    per element, are no images.
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
    """As `convolution_backward_by`, with one bit per element of y in place of y."""
    return replace(convolution_backward_by(name), name=f"convolution_backward_by_signs.{_short(name)}")


def _readers_of_signs(name: str, node: Node, code: Value) -> Iterator[Node]:
    whole = replace(node, operation=convolution_backward_by_signs(name), args=(*node.args[:-1], code))
    yield whole
    yield from _parts(name, whole)


for _name in _BY_NAME:
    register_parts(convolution_backward_by(_name), partial(_parts, _name))
    _code = Code(lambda node: node.args[-1], packed_type, PACK_SIGNS, partial(_readers_of_signs, _name))
    register_code(convolution_backward_by(_name), _code)
