"""Convolutions and products by oneDNN with weights reordered ahead, and with what follows them in the same pass.

oneDNN reads weights in blocks of its own. It reorders plain weights in every call, which for few rows or a small image
takes as long as the arithmetic. A reordered tensor is opaque: PyTorch tells neither its strides nor its bytes, so in a
Program it has the type of the weights it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undertow.ir.operation import Operation, register_operation
from undertow.kernels.convolution import shape_of
from undertow.ops.own import register_kernel

Pair = tuple[int, int]
onednn = torch.ops.mkldnn


def has_onednn() -> bool:
    """Whether this PyTorch was built with oneDNN's pointwise operations."""
    return torch.backends.mkldnn.is_available() and hasattr(onednn, "_linear_pointwise")


def _on_reordered(
    name: str,
    run: Callable[..., Tensor],
    reorder: Operation,
    settings_of: Callable[..., tuple[Any, ...]],
    flops: Callable[..., int],
) -> Operation:
    """An operation whose second argument was made by `reorder(weights, *settings)`; `settings_of` finds the settings.

    When it is timed alone it gets plain tensors, which are reordered before the clock starts.
    """

    def rehearse(x: Tensor, weight: Tensor, *others: Any) -> Callable[[], Any]:
        reordered = reorder(weight, *settings_of(x, weight, *others))
        return lambda: run(x, reordered, *others)

    return register_operation(Operation(name, run, can_repeat=False, rehearse=rehearse, flops=flops))


def _reorder_convolution(
    weight: Tensor, x_shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    return onednn._reorder_convolution_weight(weight.contiguous(), padding, stride, dilation, groups, x_shape)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    residual: Tensor | None,
    has_relu: bool,
) -> Tensor:
    geometry = padding, stride, dilation, groups
    if residual is None:
        y = onednn._convolution_pointwise(x, weight, bias, *geometry, "relu" if has_relu else "none", [], "")
    else:
        unary = "relu" if has_relu else None
        y = onednn._convolution_pointwise.binary(
            x, residual, weight, bias, *geometry, "add", 1.0, unary, [], None
        )  # fmt: skip
    # With one channel a tensor has both layouts, and PyTorch may choose the other one.
    return y.contiguous(memory_format=torch.channels_last)


def _reorder_product(right: Tensor, num_rows: int) -> Tensor:
    return onednn._reorder_linear_weight(right.t().contiguous(), num_rows)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    name, _, algorithm = activation.partition(" ")
    return onednn._linear_pointwise(left, right, bias, name, [], algorithm)


# (weight, sizes of x, stride, padding, dilation, groups) -> reordered
REORDER_CONVOLUTION = register_kernel("convolution_weight.onednn", _reorder_convolution, is_preparation=True)

# (x, reordered, bias, stride, padding, dilation, groups, residual, has_relu) -> y
CONVOLUTION = _on_reordered(
    "convolution_prepared.onednn",
    _convolve,
    REORDER_CONVOLUTION,
    lambda x, weight, bias, *others: (tuple(x.shape), *others[:4]),
    # A reordered tensor has the type of the weights it was made from.
    lambda x, weight, bias, *others: shape_of(x, weight, *others[:4]).flops,
)

# (right, number of rows of the left factor) -> reordered
REORDER_PRODUCT = register_kernel("mm_weight.onednn", _reorder_product, is_preparation=True)

# (left, reordered, bias or None, activation) -> activation(left @ right + bias)
# Activations have oneDNN's names, and the algorithm after a blank: "none", "relu", "gelu none", "gelu tanh".
PRODUCT_PREPARED = _on_reordered(
    "mm_prepared.onednn",
    _multiply,
    REORDER_PRODUCT,
    lambda left, *others: (left.shape[0],),
    lambda left, right, *others: 2 * left.numel() * right.shape[1],
)
