"""The two halves of a convolution's backward pass as two nodes: EXACT.

In: a `convolution_backward` node. Out: one node for the cotangents of weights and bias, one for the input's cotangent.

One call of `convolution_backward` needs the input, both cotangents and the kernel's reordered copies at the same time.
As two nodes, the weights' half runs before the input's cotangent exists, and the input's half needs no input, which may
be freed in between. PyTorch computes the halves one after the other anyway, so the two nodes together take as long.

The input's half needs only the input's sizes, but PyTorch's function requires a tensor: `_stand_in` gives it address
space without memory. Only oneDNN's kernel is known never to read it, so only its convolutions are split.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undertow.alternatives.registry import register_parts
from undertow.ir import Node
from undertow.ops.own import register_kernel
from undertow.torch_internals import select_conv_backend

aten = torch.ops.aten
_reserved = torch.empty(0)


def _stand_in(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor that nobody reads or writes, so its pages are never mapped."""
    global _reserved
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if _reserved.numel() < count:
        _reserved = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)
    return _reserved.as_strided(shape, strides)


def _input_part(ct: Tensor, weight: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], *geometry: Any) -> Tensor:
    x = _stand_in(shape, strides)
    return aten.convolution_backward.default(ct, x, weight, None, *geometry, [True, False, False])[0]


def _weight_part(ct: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> tuple[Tensor | None, ...]:
    *geometry, wants_bias = rest
    wants = [False, True, wants_bias]
    return aten.convolution_backward.default(ct, x, weight, bias_sizes, *geometry, wants)[1:]


def _flops_of_half(ct: Tensor, weight: Tensor, x_shape: tuple[int, ...], is_transposed: bool) -> int:
    """Every weight meets every position once."""
    return 2 * ct.shape[0] * math.prod((x_shape if is_transposed else ct.shape)[2:]) * weight.numel()


def _flops_of_input_part(ct: Tensor, weight: Tensor, x_shape: tuple[int, ...], *rest: Any) -> int:
    return _flops_of_half(ct, weight, x_shape, rest[4])


def _flops_of_weight_part(ct: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    return _flops_of_half(ct, weight, tuple(x.shape), rest[4])


# (ct, weight, sizes and strides of x, stride, padding, dilation, transposed, output padding, groups) -> ct_x
INPUT_PART = register_kernel("convolution_backward.input", _input_part, flops=_flops_of_input_part)

# (ct, x, weight, sizes of the bias, stride, ..., groups, wants_bias) -> ct_weight, ct_bias
WEIGHT_PART = register_kernel(
    "convolution_backward.weight", _weight_part, returns_tuple=True, flops=_flops_of_weight_part
)


def _parts(node: Node) -> Iterator[Node]:
    ct, x, weight, _, *geometry, _ = node.args
    ct_x, ct_weight, ct_bias = node.outputs
    if ct_x is None or ct_weight is None or not _uses_onednn(node):
        return
    yield replace(
        node,
        operation=WEIGHT_PART,
        args=(*node.args[:-1], ct_bias is not None),
        kwargs={},
        outputs=(ct_weight, ct_bias),
    )
    args = (ct, weight, x.tensor_type.shape, x.tensor_type.strides, *geometry)
    yield replace(node, operation=INPUT_PART, args=args, kwargs={}, outputs=(ct_x,))


def _uses_onednn(node: Node) -> bool:
    """Whether PyTorch uses oneDNN's kernel for a convolution of these types."""
    _, x, weight, _, *geometry, _ = node.args
    types = (x.tensor_type, weight.tensor_type)
    if any(item.dtype is not torch.float32 or item.device.type != "cpu" for item in types):
        return False
    stand_ins = [_stand_in(item.shape, item.strides) for item in types]
    if _has_two_layouts(stand_ins[0]):
        return False
    return str(select_conv_backend(*stand_ins, None, *geometry)) == "_ConvBackend.Mkldnn"


def _has_two_layouts(x: Tensor) -> bool:
    """Whether an input of one channel or one pixel has both layouts.

    Then the choice of kernel depends on strides of dims of size 1, which the Program does not know for certain.
    """
    return x.is_contiguous() and x.movedim(1, -1).is_contiguous()


register_parts(aten.convolution_backward.default, _parts)
