"""Matrix products by oneDNN, or by a loop of our own, instead of the library that PyTorch was built with.

oneDNN, on 2 cores with AVX-512, float32: 8 % faster on square products, 1.4 times on a vocabulary (1024 x 768 x 50257),
twice on a few rows (8 x 25088 x 4096); slower on some, so each shape is measured. The own one: see its kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undertow.kernels.compiler import HAS_NUMBA
from undertow.kernels.outputs import Out, given
from undertow.ops.own import register_kernel

if HAS_NUMBA:
    from undertow.kernels.packed_product import multiply_packed


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def _multiply_packed(left: Tensor, right: Tensor, out: Out = None) -> Tensor:
    left, right = (item if 1 in item.stride() else item.contiguous() for item in (left, right))
    result = given(out, 0, lambda: left.new_empty(left.shape[0], right.shape[1]))
    multiply_packed(left, right, result)
    return result


def _flops(left: Tensor, right: Tensor, *_: Any) -> int:
    return 2 * left.numel() * right.shape[1]


# (left, right, bias or None) -> left @ right + bias
PRODUCT = register_kernel("mm.onednn", _multiply, flops=_flops)

# (left, right) -> left @ right
PACKED_PRODUCT = register_kernel("mm.packed", _multiply_packed, writes_into=True, flops=_flops)
