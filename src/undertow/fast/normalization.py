"""Batch normalisation in two passes over memory, with a residual sum and a ReLU in the second, and layer normalisation
that reads each row once: the operations, and the nodes they may replace.

Batch normalisation leaves the time of ResNet-50's step as it is: it saves two passes over memory, and its loop is a
little slower than PyTorch's on what is in the cache. It matters where activations are large.

Batch normalisation takes channels_last activations. In training mode the new running statistics are outputs, so the
operation is functional. Layer normalisation takes contiguous activations and normalises the last dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undertow.alternatives.registry import Makers, SecondRun, register_second_run
from undertow.fast.images import is_channels_last, is_float_image
from undertow.fast.registry import stands_for
from undertow.ir import Node, Value
from undertow.ir.pytorch import operation_of
from undertow.kernels.batch_norm import batch_norm_backward, batch_norm_evaluate, batch_norm_forward, rows_of
from undertow.kernels.compiler import HAS_NUMBA
from undertow.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from undertow.kernels.outputs import Out, given
from undertow.ops.own import functional, register_kernel

aten = torch.ops.aten


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    epsilon: float,
    residual: Tensor | None,
    has_relu: bool,
    out: Out = None,
) -> tuple[Tensor, ...]:
    y = given(out, 0, lambda: torch.empty_like(x, memory_format=torch.channels_last))
    mean, inverse_std = (given(out, index, lambda: x.new_empty(x.shape[1])) for index in (1, 2))
    new_mean, new_var = (None if item is None else item.clone() for item in (running_mean, running_var))
    rows, y_rows, other = _rows_of(x), rows_of(y), _rows(residual)
    batch_norm_forward(
        rows, weight, bias, new_mean, new_var, momentum, epsilon, other, has_relu, y_rows, mean, inverse_std
    )
    return (y, mean, inverse_std, *(item for item in (new_mean, new_var) if item is not None))


def _evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    epsilon: float,
    residual: Tensor | None,
    has_relu: bool,
    out: Out = None,
) -> Tensor:
    y = given(out, 0, lambda: torch.empty_like(x, memory_format=torch.channels_last))
    rows, y_rows, other = _rows_of(x), rows_of(y), _rows(residual)
    batch_norm_evaluate(rows, weight, bias, running_mean, running_var, epsilon, other, has_relu, y_rows)
    return y


def _backward(
    ct: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse_std: Tensor,
    y: Tensor | None,
    keeps_masked: bool,
    out: Out = None,
) -> tuple[Tensor | None, ...]:
    ct_x = given(out, 0, lambda: torch.empty_like(x, memory_format=torch.channels_last))
    ct_weight, ct_bias = (given(out, index, lambda: torch.empty_like(mean)) for index in (1, 2))
    masked = given(out, 3, lambda: torch.empty_like(x, memory_format=torch.channels_last)) if keeps_masked else None
    rows, masked_rows = _rows_of(x), None if masked is None else rows_of(masked)
    batch_norm_backward(
        _rows_of(ct), rows, weight, mean, inverse_std, _rows(y), rows_of(ct_x), ct_weight, ct_bias, masked_rows
    )
    return ct_x, ct_weight, ct_bias, masked


def _scale(weight: Tensor | None, running_var: Tensor, epsilon: float) -> Tensor:
    scale = (running_var.double() + epsilon).rsqrt()
    return scale if weight is None else scale * weight


def _fold_weight(
    convolution: Tensor, weight: Tensor | None, running_var: Tensor, epsilon: float, channel_dim: int
) -> Tensor:
    shape = [-1 if dim == channel_dim else 1 for dim in range(convolution.dim())]
    return (convolution * _scale(weight, running_var, epsilon).view(shape)).to(convolution.dtype).contiguous()


def _fold_bias(
    convolution_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    epsilon: float,
) -> Tensor:
    centre = -running_mean.double() if convolution_bias is None else convolution_bias.double() - running_mean
    shifted = centre * _scale(weight, running_var, epsilon)
    return (shifted if bias is None else shifted + bias).to(running_mean.dtype)


def _rows(images: Tensor | None) -> Tensor | None:
    return None if images is None else _rows_of(images)


def _rows_of(images: Tensor) -> Tensor:
    """The rows of images; a tensor of one channel has both layouts, and PyTorch may have made it in the other one."""
    return rows_of(images.contiguous(memory_format=torch.channels_last))


# (x, weight, bias, running mean, running variance, momentum, epsilon, residual, has_relu)
#     -> y, mean, 1 / standard deviation, and the new running statistics where there are old ones
BATCH_NORM = register_kernel("batch_norm.fused", _forward, returns_tuple=True, writes_into=True, droppable=(3, 4))

# (x, weight, bias, running mean, running variance, epsilon, residual, has_relu) -> y
BATCH_NORM_EVALUATE = register_kernel("batch_norm.evaluate", _evaluate, writes_into=True)

# (ct, x, weight, mean, 1 / standard deviation, y or None, keeps_masked) -> ct_x, ct_weight, ct_bias, masked ct or None
# y, the output of the ReLU, masks the cotangent; the residual's cotangent is the masked one.
BATCH_NORM_BACKWARD = register_kernel("batch_norm_backward.fused", _backward, returns_tuple=True, writes_into=True)

# With the running statistics, y = (x - mean) s + bias with s = weight / sqrt(variance + epsilon) is linear. After a
# convolution by w with bias b it is the convolution by w s with bias (b - mean) s + bias. It is computed in float64 and
# rounded once.

# (weights of the convolution, weight, running variance, epsilon, dim of the channels in the first) -> w s
FOLD_WEIGHT = register_kernel("fold_weight", _fold_weight, is_preparation=True)

# (bias of the convolution, weight, bias, running mean, running variance, epsilon) -> (b - mean) s + bias
FOLD_BIAS = register_kernel("fold_bias", _fold_bias, is_preparation=True)


def _without_statistics(node: Node, _: Makers) -> Iterator[SecondRun]:
    """A second run does not update the running statistics: the outputs do not depend on them."""
    yield SecondRun(replace(node, args=(*node.args[:3], None, None, *node.args[5:]), outputs=node.outputs[:3]))


register_second_run(BATCH_NORM, _without_statistics)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, out: Out = None) -> tuple[Tensor, ...]:
    y = given(out, 0, lambda: torch.empty_like(x))
    mean, inverse_std = (given(out, index, lambda: x.new_empty(*x.shape[:-1], 1)) for index in (1, 2))
    rows, y_rows = x.flatten(0, -2), y.flatten(0, -2)
    layer_norm_forward(rows, None, weight, bias, epsilon, y_rows, mean.view(-1), inverse_std.view(-1), None)
    return y, mean, inverse_std


def _layer_norm_backward(
    ct: Tensor, x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, out: Out = None
) -> tuple[Tensor, ...]:
    ct_x = given(out, 0, lambda: torch.empty_like(x))
    ct_weight, ct_bias = (given(out, index, lambda: torch.empty_like(weight)) for index in (1, 2))
    ct_rows, rows, ct_x_rows = (item.flatten(0, -2) for item in (ct.contiguous(), x, ct_x))
    layer_norm_backward(ct_rows, rows, mean.view(-1), inverse_std.view(-1), weight, ct_x_rows, ct_weight, ct_bias)
    return ct_x, ct_weight, ct_bias


# (x, weight, bias, epsilon) -> y, mean, 1 / standard deviation
LAYER_NORM = register_kernel("layer_norm.fused", _layer_norm, returns_tuple=True, writes_into=True)

# (ct, x, mean, 1 / standard deviation, weight) -> ct_x, ct_weight, ct_bias
LAYER_NORM_BACKWARD = register_kernel(
    "layer_norm_backward.fused", _layer_norm_backward, returns_tuple=True, writes_into=True
)


@stands_for(aten.native_batch_norm.default, functional(operation_of(aten.native_batch_norm.default)))
def batch_norm_choices(node: Node) -> list[Node]:
    """Other ways to run batch normalisation; in evaluation only its first output may be used."""
    x, weight, bias, running_mean, running_var, is_training, momentum, epsilon = node.args
    if not is_float_image(x, weight, bias, running_mean):
        return []
    if is_training:
        args: Any = (x, weight, bias, running_mean, running_var, momentum, epsilon, None, False)
        return [replace(node, operation=BATCH_NORM, args=args, kwargs={})]
    return _evaluation(node, (x, weight, bias, running_mean, running_var, epsilon, None, False))


@stands_for(aten._native_batch_norm_legit_no_training.default)
def batch_norm_evaluation_choices(node: Node) -> list[Node]:
    """Other ways to run batch normalisation with the running statistics."""
    x, weight, bias, running_mean, running_var, _, epsilon = node.args
    if not is_float_image(x, weight, bias, running_mean):
        return []
    return _evaluation(node, (x, weight, bias, running_mean, running_var, epsilon, None, False))


@stands_for(aten.native_batch_norm_backward.default)
def batch_norm_backward_choices(node: Node) -> list[Node]:
    """Other ways to run the backward pass of batch normalisation in training mode."""
    ct, x, weight, _, _, mean, inverse_std, is_training, _, _ = node.args
    if not is_training or mean is None or not is_float_image(x, weight):
        return []
    if node.outputs[0] is None or not is_channels_last(node.outputs[0].tensor_type):
        return []
    args = (ct, x, weight, mean, inverse_std, None, False)
    return [replace(node, operation=BATCH_NORM_BACKWARD, args=args, kwargs={}, outputs=(*node.outputs, None))]


def _evaluation(node: Node, args: tuple[Any, ...]) -> list[Node]:
    if any(value is not None for value in node.outputs[1:]):
        return []
    return [replace(node, operation=BATCH_NORM_EVALUATE, args=args, kwargs={}, outputs=node.outputs[:1])]


@stands_for(aten.native_layer_norm.default)
def layer_norm_choices(node: Node) -> list[Node]:
    """Other ways to run layer normalisation over the last dim."""
    x, shape, weight, bias, epsilon = node.args
    if not _are_rows(x, shape, weight, bias):
        return []
    return [replace(node, operation=LAYER_NORM, args=(x, weight, bias, epsilon), kwargs={})]


@stands_for(aten.native_layer_norm_backward.default)
def layer_norm_backward_choices(node: Node) -> list[Node]:
    """Other ways to run the backward pass of layer normalisation."""
    ct, x, shape, mean, inverse_std, weight, bias, _ = node.args
    if not _are_rows(x, shape, weight, bias):
        return []
    return [replace(node, operation=LAYER_NORM_BACKWARD, args=(ct, x, mean, inverse_std, weight), kwargs={})]


def _are_rows(x: Value, shape: Any, weight: Value | None, bias: Value | None) -> bool:
    if not HAS_NUMBA or weight is None or bias is None or len(shape) != 1 or len(x.tensor_type.shape) < 2:
        return False
    kinds = [value.tensor_type for value in (x, weight, bias)]
    is_plain = all(kind.dtype is torch.float32 and kind.is_contiguous and kind.num_elements for kind in kinds)
    return is_plain and x.tensor_type.device.type == "cpu"
