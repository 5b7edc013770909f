"""Layers whose weights stay integers of 8 or 4 bits, or signs, in memory, with a scale for each output channel.

In: a weight whose codebook holds integers, none of them pruned. Out: the layer's output, from float32 inputs: nothing
but the weights is rounded. Few rows of x meet the weights in registers. For more, and for convolutions, the weights of
some filters at a time are unpacked into the same small piece of memory, for PyTorch's own operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from undertow.coding.tensors import CodedTensor
from undertow.kernels.packed_rows import PackedRows, multiply_few, pack_rows, unpack_rows, unpacked_columns
from undertow.small.layers import Layer, SmallLayer, row_scales

# Measured on one core, 25,088 x 4,096: with 64 rows of x the loop takes 110 ms for int8, unpacking and a dense product
# 200, and the dense layer 190; its time grows with the rows, that of the others less.
_MOST_FEW = 128
# Filters that are unpacked at a time: a megabyte of weights, which fits an L2 cache, but enough for a good product.
_PIECE_BYTES = 1 << 20
_LEAST_ROWS = 64


def bits_for(tensor: CodedTensor) -> int | None:
    """How many bits hold the integers of a codebook; None if it holds others, or weights are pruned."""
    values = tensor.codebook
    if tensor.mask is not None or not len(values) or not torch.equal(values, values.round()):
        return None
    if set(values.tolist()) <= {-1.0, 1.0}:
        return 1
    least, most = float(values.min()), float(values.max())
    return next((bits for bits in (4, 8) if -(2 ** (bits - 1)) <= least and most < 2 ** (bits - 1)), None)


class PackedLayer(SmallLayer):
    """A linear or convolutional layer with weights of few bits."""

    def __init__(self, layer: Layer, tensor: CodedTensor, num_bits: int) -> None:
        super().__init__(layer, tensor.shape)
        self.form = f"int{num_bits}" if num_bits > 1 else "signs"
        self.num_bits = num_bits
        integers = tensor.codebook.to(torch.int16)[tensor.codes].reshape(tensor.shape[0], -1)
        rows = pack_rows(integers, row_scales(tensor).contiguous(), num_bits)
        self.register_buffer("data", rows.data)
        self.register_buffer("scales", rows.scales)

    @property
    def rows(self) -> PackedRows:
        """The weight."""
        num_columns = math.prod(self.shape[1:])
        return PackedRows(self.get_buffer("data"), self.get_buffer("scales"), num_columns, self.num_bits)

    @property
    def weight_bytes(self) -> int:
        return self.get_buffer("data").nbytes + self.get_buffer("scales").nbytes

    @property
    def weight(self) -> Tensor:
        return unpack_rows(self.rows, 0, self.shape[0]).contiguous().reshape(self.shape)

    def multiply(self, x: Tensor) -> Tensor:
        """See `SmallLayer`."""
        if self.window is None and len(x) <= _MOST_FEW:
            return multiply_few(self.rows, self.bias, x)
        rows, pieces = self.rows, list(self._pieces())
        # The same memory for every piece: new pages would cost more than the unpacking.
        memory = torch.empty(max(last - first for first, last in pieces) * unpacked_columns(rows))
        return torch.cat([self._multiply_piece(x, rows, first, last, memory) for first, last in pieces], dim=1)

    def _multiply_piece(self, x: Tensor, rows: PackedRows, first: int, last: int, memory: Tensor) -> Tensor:
        weight, bias = unpack_rows(rows, first, last, memory), self.bias[first:last]
        if self.window is None:
            return functional.linear(x, weight, bias)
        _, stride, pad, dilation, groups = self.window
        per_group = self.shape[0] // groups
        group, num_groups = first // per_group, max(1, (last - first) // per_group)
        x = x[:, group * self.shape[1] : (group + num_groups) * self.shape[1]]
        weight = weight.reshape(last - first, *self.shape[1:])
        return functional.conv2d(x, weight, bias, stride, pad, dilation, num_groups)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Whole groups, or filters of one group, whose weights are about as many bytes as a piece has."""
        per_group = self.shape[0] // (1 if self.window is None else self.window.groups)
        most = max(_LEAST_ROWS, _PIECE_BYTES // (4 * math.prod(self.shape[1:])))
        if most >= per_group:
            step = most // per_group * per_group
            yield from ((first, min(first + step, self.shape[0])) for first in range(0, self.shape[0], step))
            return
        for group in range(0, self.shape[0], per_group):
            for first in range(group, group + per_group, most):
                yield first, min(first + most, group + per_group)
