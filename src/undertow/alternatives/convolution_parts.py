"""The two halves of a convolution's backward pass, each by itself: EXACT.

One call of `convolution_backward` holds the input, both cotangents and the kernel's reordered copies together. Apart,
the weights' half runs without the input's cotangent, and the input's half without the input, which may be freed in
between. PyTorch computes the halves one after the other anyway, so that together they take the same time.

The input's half is told the input's sizes alone. PyTorch's function wants a tensor for that: `_stand_in` gives it
address space that no memory stands behind. Only oneDNN's kernel is known never to look at it.
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

aten = torch.ops.aten
_reserved = torch.empty(0)


def _stand_in(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor that is never read or written; its pages are never mapped."""
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
    if ct_x is None or ct_weight is None or not _is_by_onednn(node):
        return
    kind = x.tensor_type
    yield replace(
        node,
        operation=WEIGHT_PART,
        args=(*node.args[:-1], ct_bias is not None),
        kwargs={},
        outputs=(ct_weight, ct_bias),
    )
    args = (ct, weight, kind.shape, kind.strides, *geometry)
    yield replace(node, operation=INPUT_PART, args=args, kwargs={}, outputs=(ct_x,))


def _is_by_onednn(node: Node) -> bool:
    """Whether PyTorch takes oneDNN's kernel for a convolution of this type."""
    _, x, weight, _, *geometry, _ = node.args
    kinds = (x.tensor_type, weight.tensor_type)
    if any(kind.dtype is not torch.float32 or kind.device.type != "cpu" for kind in kinds):
        return False
    likenesses = [_stand_in(kind.shape, kind.strides) for kind in kinds]
    if _has_two_layouts(likenesses[0]):
        return False
    return str(torch._C._select_conv_backend(*likenesses, None, *geometry)) == "_ConvBackend.Mkldnn"


def _has_two_layouts(x: Tensor) -> bool:
    """Whether an input of one channel or one position is of both layouts: what runs then hangs on strides that say
    nothing, and of which the Program is not sure."""
    return x.is_contiguous() and x.movedim(1, -1).is_contiguous()


register_parts(aten.convolution_backward.default, _parts)
