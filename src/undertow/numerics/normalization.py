"""Other ways to run batch normalisation on channels_last activations, and layer normalisation.

Batch normalisation makes no difference to the step of ResNet-50: two passes over memory less, and a loop that is a
little slower than PyTorch's on what lies in the cache. It matters where activations are large.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.ir import Node, Value
from undertow.kernels.compiler import HAS_NUMBA
from undertow.numerics.layout import is_channels_last, is_float_image
from undertow.ops.fast_normalization import (
    BATCH_NORM,
    BATCH_NORM_BACKWARD,
    BATCH_NORM_EVALUATE,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
)


def batch_norm_choices(node: Node) -> list[Node]:
    """Ways to run batch normalisation; of its outputs, evaluation is asked for the first alone."""
    x, weight, bias, running_mean, running_var, is_training, momentum, epsilon = node.args
    if not is_float_image(x, weight, bias, running_mean):
        return []
    if is_training:
        args: Any = (x, weight, bias, running_mean, running_var, momentum, epsilon, None, False)
        return [node, replace(node, operation=BATCH_NORM, args=args, kwargs={})]
    return _evaluation(node, (x, weight, bias, running_mean, running_var, epsilon, None, False))


def batch_norm_evaluation_choices(node: Node) -> list[Node]:
    """Ways to run it by the running statistics."""
    x, weight, bias, running_mean, running_var, _, epsilon = node.args
    if not is_float_image(x, weight, bias, running_mean):
        return []
    return _evaluation(node, (x, weight, bias, running_mean, running_var, epsilon, None, False))


def batch_norm_backward_choices(node: Node) -> list[Node]:
    """Ways to run its backward pass in training mode."""
    ct, x, weight, _, _, mean, inverse_std, is_training, _, _ = node.args
    if not is_training or mean is None or not is_float_image(x, weight):
        return []
    if node.outputs[0] is None or not is_channels_last(node.outputs[0].tensor_type):
        return []
    args = (ct, x, weight, mean, inverse_std, None, False)
    return [node, replace(node, operation=BATCH_NORM_BACKWARD, args=args, kwargs={}, outputs=(*node.outputs, None))]


def _evaluation(node: Node, args: tuple[Any, ...]) -> list[Node]:
    if any(value is not None for value in node.outputs[1:]):
        return []
    return [node, replace(node, operation=BATCH_NORM_EVALUATE, args=args, kwargs={}, outputs=node.outputs[:1])]


def layer_norm_choices(node: Node) -> list[Node]:
    """Ways to run layer normalisation over the last dim."""
    x, shape, weight, bias, epsilon = node.args
    if not _are_rows(x, shape, weight, bias):
        return []
    return [node, replace(node, operation=LAYER_NORM, args=(x, weight, bias, epsilon), kwargs={})]


def layer_norm_backward_choices(node: Node) -> list[Node]:
    """Ways to run its backward pass."""
    ct, x, shape, mean, inverse_std, weight, bias, _ = node.args
    if not _are_rows(x, shape, weight, bias):
        return []
    return [node, replace(node, operation=LAYER_NORM_BACKWARD, args=(ct, x, mean, inverse_std, weight), kwargs={})]


def _are_rows(x: Value, shape: Any, weight: Value | None, bias: Value | None) -> bool:
    if not HAS_NUMBA or weight is None or bias is None or len(shape) != 1 or len(x.tensor_type.shape) < 2:
        return False
    kinds = [value.tensor_type for value in (x, weight, bias)]
    is_plain = all(kind.dtype is torch.float32 and kind.is_contiguous and kind.num_elements for kind in kinds)
    return is_plain and x.tensor_type.device.type == "cpu"
