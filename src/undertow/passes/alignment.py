"""`align_products`: sizes of large matrix products become multiples of 16 bytes, which a GPU's product units need.

In: a derived Program. Out: one in which odd operands of products get a few zeros after their rows or columns, and the
results are cut to size. An example is a vocabulary of 50,257 in bfloat16: its three products took 31 of the 62 ms of a
step of GPT-2 small on an H200. Both copies are elementwise and become part of the operations that make or read the
matrix. REORDERS: another kernel adds in another order.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.ir import Node, Program, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.ir.types import contiguous_strides

aten = torch.ops.aten

UNIT_BYTES = 16  # one load of a product unit; for other sizes cuBLAS takes a general kernel, which is slower
LEAST_ELEMENTS = 1 << 20  # smaller matrices are not worth a copy


def align_products(program: Program) -> Program:
    """The Program with aligned products where they are large."""
    return _Aligner(program).run()


class _Aligner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.maker = program.makers
        self.padded: dict[tuple[Value, tuple[int, int]], Value] = {}
        self.nodes: list[Node] = []

    def run(self) -> Program:
        pieces = []
        for position, node in enumerate(self.program.nodes):
            if position == self.program.boundary:
                self.padded.clear()  # nothing is kept for the backward pass twice
            start = len(self.nodes)
            if node.target is aten.mm.default:
                self._add_product(node)
            else:
                self.nodes.append(node)
            pieces.append(self.nodes[start:])
        return self.program.with_pieces(pieces)

    def _add_product(self, node: Node) -> None:
        left, right = node.args
        (result,) = node.named_outputs
        rows, inner = left.tensor_type.shape
        columns = right.tensor_type.shape[1]
        unit = UNIT_BYTES // result.tensor_type.dtype.itemsize
        more_rows, more_inner, more_columns = (-size % unit for size in (rows, inner, columns))
        largest = max(value.tensor_type.num_elements for value in (left, right, result))
        is_odd = more_rows or more_inner or more_columns
        if result.tensor_type.device.type != "cuda" or not is_odd or largest < LEAST_ELEMENTS:
            self.nodes.append(node)
            return
        left = self._pad(left, (more_rows, more_inner), node)
        right = self._pad(right, (more_inner, more_columns), node)
        shape = (rows + more_rows, columns + more_columns)
        whole = self._emit(aten.mm.default, (left, right), result, shape, node)
        for dim, (size, more) in enumerate(((rows, more_rows), (columns, more_columns))):
            if more:
                shape = (*shape[:dim], size, *shape[dim + 1 :])
                strides = whole.tensor_type.strides
                whole = self._emit(aten.slice.Tensor, (whole, dim, 0, size), result, shape, node, strides)
        copy = {"memory_format": torch.contiguous_format}
        self.nodes.append(Node(operation_of(aten.clone.default), (whole,), copy, (result,), node.origin, node.phase))

    def _pad(self, value: Value, more: tuple[int, int], product: Node) -> Value:
        """`value` with `more` rows and columns of zeros."""
        if more == (0, 0):
            return value
        base, is_transposed = value, False
        while base in self.maker and self.maker[base].target is aten.t.default:
            base, is_transposed = self.maker[base].args[0], not is_transposed
        below, right = more[::-1] if is_transposed else more
        key = (base, (below, right))
        if key not in self.padded:
            rows, columns = base.tensor_type.shape
            padding = (base, (0, right, 0, below), 0.0)
            shape = (rows + below, columns + right)
            self.padded[key] = self._emit(aten.constant_pad_nd.default, padding, base, shape, product)
        found = self.padded[key]
        if not is_transposed:
            return found
        kind = found.tensor_type
        return self._emit(aten.t.default, (found,), value, kind.shape[::-1], product, kind.strides[::-1])

    def _emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: Value,
        shape: tuple[int, ...],
        product: Node,
        strides: tuple[int, ...] | None = None,
    ) -> Value:
        kind = like.tensor_type
        strides = contiguous_strides(shape) if strides is None else strides
        value = Value(f"{like.name}_{len(self.nodes)}", TensorType(kind.dtype, shape, strides, kind.device))
        self.nodes.append(Node(target, args, {}, (value,), product.origin, product.phase))
        return value
