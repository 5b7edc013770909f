"""Max pooling of channels_last activations with one-byte codes instead of int64 indices. EXACT: nothing is rounded.

The backward pass reads only the cotangent and the codes, so the input need not be kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undertow.fast.images import is_channels_last, is_float_image
from undertow.fast.registry import stands_for
from undertow.ir import Node
from undertow.ir.schema import bind_arguments
from undertow.kernels.max_pool import max_pool_backward, max_pool_forward
from undertow.kernels.outputs import Out, given
from undertow.ops.own import register_kernel

Pair = tuple[int, int]


def _forward(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out_size: Pair, out: Out = None
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], *out_size)
    y = given(out, 0, lambda: torch.empty(shape, memory_format=torch.channels_last))
    codes = given(out, 1, lambda: torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last))
    x = x.contiguous(memory_format=torch.channels_last)  # with one channel it may have the other layout
    max_pool_forward(_innermost(x), kernel, stride, padding, dilation, _innermost(y), _innermost(codes))
    return y, codes


def _maxima(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out_size: Pair, out: Out = None
) -> Tensor:
    return _forward(x, kernel, stride, padding, dilation, out_size, None if out is None else (*out, None))[0]


def _backward(
    ct: Tensor, codes: Tensor, size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Out = None
) -> Tensor:
    ct = ct.contiguous(memory_format=torch.channels_last)
    ct_x = given(out, 0, lambda: torch.empty((*ct.shape[:2], *size), memory_format=torch.channels_last))
    max_pool_backward(_innermost(ct), _innermost(codes), None, kernel, stride, padding, dilation, _innermost(ct_x))
    return ct_x


def _innermost(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1)


# (x, kernel, stride, padding, dilation, output size) -> y, codes
MAX_POOL = register_kernel("max_pool.fused", _forward, returns_tuple=True, writes_into=True)

# The same for the maxima alone, where nothing is differentiated.
MAX_POOL_MAXIMA = register_kernel("max_pool.maxima", _maxima, writes_into=True)

# (ct, codes, input size, kernel, stride, padding, dilation) -> ct_x
MAX_POOL_BACKWARD = register_kernel("max_pool_backward.fused", _backward, writes_into=True)


_MAX_WINDOW_SIZE = 256  # the kernel writes the index of the maximum as a byte


@stands_for(torch.ops.aten.max_pool2d_with_indices.default)
def max_pool_choices(node: Node) -> list[Node]:
    """Other ways to run `max_pool2d_with_indices`."""
    y, indices = node.outputs
    target: Any = node.target
    bound = bind_arguments(target, node.args, node.kwargs)
    x = bound["self"]
    if y is None or indices is not None or not is_float_image(x) or not is_channels_last(y.tensor_type):
        return []
    kernel, padding, dilation = (_pair(bound[name]) for name in ("kernel_size", "padding", "dilation"))
    stride = _pair(bound["stride"]) if bound["stride"] else kernel
    if kernel[0] * kernel[1] > _MAX_WINDOW_SIZE:
        return []
    args = (x, kernel, stride, padding, dilation, y.tensor_type.shape[2:])
    return [replace(node, operation=MAX_POOL_MAXIMA, args=args, kwargs={}, outputs=(y,))]


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, *others = value if isinstance(value, tuple | list) else (value,)
    return first, others[0] if others else first
