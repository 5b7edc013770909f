"""Matrix products by oneDNN, or by Undertow's own loop, instead of the library that PyTorch was built with.

oneDNN, on 2 cores with AVX-512, float32: 8 % faster on square products, 1.4 times on a vocabulary (1024 x 768 x 50257),
twice on a few rows (8 x 25088 x 4096); slower on some, so each shape is measured. For the own loop see
`kernels.packed_product`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undertow.fast.onednn import PRODUCT_PREPARED, REORDER_PRODUCT, has_onednn
from undertow.fast.registry import is_plain_form, prepared_for, stands_for
from undertow.ir import Node, Value
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
is_plain_form(PRODUCT, PRODUCT_PREPARED)

# (left, right) -> left @ right
PACKED_PRODUCT = register_kernel("mm.packed", _multiply_packed, writes_into=True, flops=_flops)


@stands_for(torch.ops.aten.mm.default)
def product_choices(node: Node) -> list[Node]:
    """Other ways to run `mm(left, right)`."""
    left, right = node.args
    found = _choices(node, left, right, None)
    if not found or not HAS_NUMBA:
        return found
    return [*found, replace(node, operation=PACKED_PRODUCT)]


@stands_for(torch.ops.aten.addmm.default)
def biased_product_choices(node: Node) -> list[Node]:
    """Other ways to run `addmm(bias, left, right)` where the bias is one number per column."""
    bias, left, right = node.args[:3]
    if node.kwargs or len(node.args) > 3 or len(bias.tensor_type.shape) != 1:
        return []
    return _choices(node, left, right, bias)


@prepared_for(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
def prepared_product_choices(node: Node) -> dict[Node, Node]:
    """The product by oneDNN with its right factor reordered ahead, and the node that reorders it."""
    has_bias = node.target is torch.ops.aten.addmm.default
    if not (biased_product_choices(node) if has_bias else product_choices(node)):
        return {}
    bias, left, right = node.args if has_bias else (None, *node.args)
    prepared = Value(f"{node.named_outputs[0].name}_prepared", right.type)
    args = (right, left.tensor_type.shape[0])
    preparation = replace(node, operation=REORDER_PRODUCT, args=args, kwargs={}, outputs=(prepared,))
    return {replace(node, operation=PRODUCT_PREPARED, args=(left, prepared, bias, "none"), kwargs={}): preparation}


def _choices(node: Node, left: Value, right: Value, bias: Value | None) -> list[Node]:
    (result,) = node.named_outputs
    given = [value for value in (left, right, bias) if value is not None]
    is_float = all(value.tensor_type.dtype is torch.float32 for value in given)
    is_on_cpu = all(value.tensor_type.device.type == "cpu" for value in given)
    has_elements = all(value.tensor_type.num_elements > 0 for value in (*given, result))
    if not (is_float and is_on_cpu and has_elements and has_onednn() and result.tensor_type.is_contiguous):
        return []
    return [replace(node, operation=PRODUCT, args=(left, right, bias), kwargs={})]
