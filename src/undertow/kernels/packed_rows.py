"""Weights of 8, 4 or 1 bits, which stay so in memory: products with float32, and rows unpacked for other operations.

In: a weight is an integer (of 1 bit: -1 or 1) times the scale of its row. Out: float32. Rows are padded to a multiple
of 32 columns, which meet zeros of x:

- 8 bits: a byte each, from -128 to 127;
- 4 bits: 8 more than the weight, from 0 to 15; of 32 columns, the first 16 are the low halves of 16 bytes, the others
  the high halves;
- 1 bit: bit i of byte j is column 8 j + i, set for 1.

A product of few rows of x is bound by reading the weights, so it takes as much less time as they take less memory. For
many rows of x unpacking is paid once, and the product is dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy
import torch
from torch import Tensor
from torch.nn import functional

from undertow.kernels.compiler import cached_njit
from undertow.kernels.narrow_vectors import (
    load_high_halves,
    load_low_halves,
    load_signed_bytes,
    load_signs,
    sum_lanes,
)
from undertow.kernels.threads import run_parallel
from undertow.kernels.vectors import load, store, zeros

_LANES = 16
_BLOCK = 2 * _LANES
_ROWS = 4  # of weights, that meet x together


@dataclass(frozen=True)
class PackedRows:
    """Weights [rows, columns] of few bits."""

    data: Tensor  # uint8 [rows, bytes]
    scales: Tensor  # float32, one per row
    num_columns: int
    num_bits: int


def pack_rows(integers: Tensor, scales: Tensor, num_bits: int) -> PackedRows:
    """Pack integers [rows, columns] that `num_bits` hold; for one bit they are -1 and 1."""
    num_columns = integers.shape[1]
    data: Any
    numbers = numpy.pad(integers.numpy(), ((0, 0), (0, -num_columns % _BLOCK)))
    if num_bits == 8:
        data = numbers.astype(numpy.int8).view(numpy.uint8)
    elif num_bits == 4:
        blocks = (numbers + 8).astype(numpy.uint8).reshape(len(numbers), -1, 2, _LANES)
        data = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(len(numbers), -1)
    else:
        data = numpy.packbits(numbers > 0, axis=1, bitorder="little")
    return PackedRows(torch.from_numpy(numpy.ascontiguousarray(data)), scales, num_columns, num_bits)


@numba.njit(forceinline=True, error_model="numpy")
def _first_lanes(row: int, num_bits: int, column: int) -> Any:
    """The weights of the 16 columns from `column`, a multiple of 32."""
    if num_bits == 8:
        return load_signed_bytes(row + column)
    if num_bits == 4:
        return load_low_halves(row + (column >> 1))
    return load_signs(row + (column >> 3))


@numba.njit(forceinline=True, error_model="numpy")
def _second_lanes(row: int, num_bits: int, column: int) -> Any:
    """The weights of the 16 columns after those."""
    if num_bits == 8:
        return load_signed_bytes(row + column + 16)
    if num_bits == 4:
        return load_high_halves(row + (column >> 1))
    return load_signs(row + (column >> 3) + 2)


@numba.njit(error_model="numpy")
def _by_one(w0: int, w1: int, w2: int, w3: int, num_bits: int, x: int, num_columns: int) -> Any:
    """Four rows of weights by one of x, which is read once for them."""
    s0 = zeros()
    s1 = zeros()
    s2 = zeros()
    s3 = zeros()
    for column in range(0, num_columns, _BLOCK):
        first, second = load(x + 4 * column), load(x + 4 * column + 64)
        s0 = s0 + _first_lanes(w0, num_bits, column) * first
        s1 = s1 + _first_lanes(w1, num_bits, column) * first
        s2 = s2 + _first_lanes(w2, num_bits, column) * first
        s3 = s3 + _first_lanes(w3, num_bits, column) * first
        s0 = s0 + _second_lanes(w0, num_bits, column) * second
        s1 = s1 + _second_lanes(w1, num_bits, column) * second
        s2 = s2 + _second_lanes(w2, num_bits, column) * second
        s3 = s3 + _second_lanes(w3, num_bits, column) * second
    return sum_lanes(s0), sum_lanes(s1), sum_lanes(s2), sum_lanes(s3)


@numba.njit(error_model="numpy")
def _by_two(w0: int, w1: int, w2: int, w3: int, num_bits: int, x: int, y: int, num_columns: int) -> Any:
    """Four rows of weights by two of x, which share their unpacking."""
    s0 = zeros()
    s1 = zeros()
    s2 = zeros()
    s3 = zeros()
    t0 = zeros()
    t1 = zeros()
    t2 = zeros()
    t3 = zeros()
    for column in range(0, num_columns, _BLOCK):
        at = 4 * column
        one, two = load(x + at), load(y + at)
        weight = _first_lanes(w0, num_bits, column)
        s0, t0 = s0 + weight * one, t0 + weight * two
        weight = _first_lanes(w1, num_bits, column)
        s1, t1 = s1 + weight * one, t1 + weight * two
        weight = _first_lanes(w2, num_bits, column)
        s2, t2 = s2 + weight * one, t2 + weight * two
        weight = _first_lanes(w3, num_bits, column)
        s3, t3 = s3 + weight * one, t3 + weight * two
        one, two = load(x + at + 64), load(y + at + 64)
        weight = _second_lanes(w0, num_bits, column)
        s0, t0 = s0 + weight * one, t0 + weight * two
        weight = _second_lanes(w1, num_bits, column)
        s1, t1 = s1 + weight * one, t1 + weight * two
        weight = _second_lanes(w2, num_bits, column)
        s2, t2 = s2 + weight * one, t2 + weight * two
        weight = _second_lanes(w3, num_bits, column)
        s3, t3 = s3 + weight * one, t3 + weight * two
    return (
        (sum_lanes(s0), sum_lanes(s1), sum_lanes(s2), sum_lanes(s3)),
        (sum_lanes(t0), sum_lanes(t1), sum_lanes(t2), sum_lanes(t3)),
    )


@numba.njit(error_model="numpy")
def _finish(out: Any, row: int, num_rows: int, sums: Any, scales: Any, bias: Any) -> None:
    out[row] = sums[0] * scales[row] + bias[row]
    if num_rows > 1:
        out[row + 1] = sums[1] * scales[row + 1] + bias[row + 1]
    if num_rows > 2:
        out[row + 2] = sums[2] * scales[row + 2] + bias[row + 2]
    if num_rows > 3:
        out[row + 3] = sums[3] * scales[row + 3] + bias[row + 3]


@cached_njit(parallel=True, error_model="numpy")
def _multiply(data: Any, num_bits: int, scales: Any, bias: Any, x: Any, out: Any) -> None:
    num, num_columns = x.shape
    row_bytes, x_row = data.shape[1], 4 * num_columns
    for block in numba.prange((data.shape[0] + _ROWS - 1) // _ROWS):
        row = block * _ROWS
        num_rows = min(_ROWS, data.shape[0] - row)
        # After the last row that row is taken again.
        last = num_rows - 1
        w0 = data[row].ctypes.data
        w1, w2, w3 = w0 + min(1, last) * row_bytes, w0 + min(2, last) * row_bytes, w0 + last * row_bytes
        for index in range(0, num - 1, 2):
            at = x.ctypes.data + index * x_row
            first, second = _by_two(w0, w1, w2, w3, num_bits, at, at + x_row, num_columns)
            _finish(out[index], row, num_rows, first, scales, bias)
            _finish(out[index + 1], row, num_rows, second, scales, bias)
        if num & 1:
            at = x.ctypes.data + (num - 1) * x_row
            only = _by_one(w0, w1, w2, w3, num_bits, at, num_columns)
            _finish(out[num - 1], row, num_rows, only, scales, bias)


@cached_njit(parallel=True, error_model="numpy")
def _unpack(data: Any, num_bits: int, scales: Any, out: Any) -> None:
    for row in numba.prange(out.shape[0]):
        weights, target, scale = data[row].ctypes.data, out[row].ctypes.data, numpy.float64(scales[row])
        for column in range(0, out.shape[1], _BLOCK):
            store(target + 4 * column, _first_lanes(weights, num_bits, column) * scale)
            store(target + 4 * column + 64, _second_lanes(weights, num_bits, column) * scale)


def multiply_few(weights: PackedRows, bias: Tensor, x: Tensor) -> Tensor:
    """x @ weights^T + bias, for few rows of x."""
    out = torch.empty(len(x), len(weights.data))
    padded = functional.pad(x, (0, -weights.num_columns % _BLOCK)).contiguous()
    run_parallel(
        _multiply, weights.data.numpy(), weights.num_bits, weights.scales.numpy(), bias.numpy(), padded.numpy(),
        out.numpy(),
    )  # fmt: skip
    return out


def unpack_rows(weights: PackedRows, first: int, last: int, memory: Tensor | None = None) -> Tensor:
    """The weights of the rows from `first` to before `last`, in float32, at the start of `memory` if that is given."""
    shape = last - first, unpacked_columns(weights)
    out = torch.empty(shape) if memory is None else memory[: math.prod(shape)].view(shape)
    run_parallel(
        _unpack, weights.data[first:last].numpy(), weights.num_bits, weights.scales[first:last].numpy(), out.numpy()
    )
    return out[:, : weights.num_columns]


def unpacked_columns(weights: PackedRows) -> int:
    """The elements from one unpacked row to the next."""
    return -(-weights.num_columns // _BLOCK) * _BLOCK
