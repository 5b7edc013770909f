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
_FEW = 4  # rows of x that share one unpacking in registers


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
def _dot_one(row: int, num_bits: int, x: int, num_columns: int) -> Any:
    s0 = zeros()
    s1 = zeros()
    s2 = zeros()
    s3 = zeros()
    column = 0
    while column + 2 * _BLOCK <= num_columns:
        at = x + 4 * column
        s0 = s0 + _first_lanes(row, num_bits, column) * load(at)
        s1 = s1 + _second_lanes(row, num_bits, column) * load(at + 64)
        s2 = s2 + _first_lanes(row, num_bits, column + _BLOCK) * load(at + 128)
        s3 = s3 + _second_lanes(row, num_bits, column + _BLOCK) * load(at + 192)
        column += 2 * _BLOCK
    if column < num_columns:
        at = x + 4 * column
        s0 = s0 + _first_lanes(row, num_bits, column) * load(at)
        s1 = s1 + _second_lanes(row, num_bits, column) * load(at + 64)
    return sum_lanes((s0 + s1) + (s2 + s3))


@numba.njit(error_model="numpy")
def _dot_four(row: int, num_bits: int, x0: int, x1: int, x2: int, x3: int, num_columns: int) -> Any:
    s0 = zeros()
    s1 = zeros()
    s2 = zeros()
    s3 = zeros()
    for column in range(0, num_columns, _BLOCK):
        at = 4 * column
        first = _first_lanes(row, num_bits, column)
        s0 = s0 + first * load(x0 + at)
        s1 = s1 + first * load(x1 + at)
        s2 = s2 + first * load(x2 + at)
        s3 = s3 + first * load(x3 + at)
        second = _second_lanes(row, num_bits, column)
        s0 = s0 + second * load(x0 + at + 64)
        s1 = s1 + second * load(x1 + at + 64)
        s2 = s2 + second * load(x2 + at + 64)
        s3 = s3 + second * load(x3 + at + 64)
    return sum_lanes(s0), sum_lanes(s1), sum_lanes(s2), sum_lanes(s3)


@cached_njit(parallel=True, error_model="numpy")
def _multiply(data: Any, num_bits: int, scales: Any, bias: Any, x: Any, out: Any) -> None:
    num, num_columns = x.shape
    x_row = 4 * num_columns
    for row in numba.prange(data.shape[0]):
        weights, scale, shift = data[row].ctypes.data, scales[row], bias[row]
        first = 0
        while first < num:
            at = x.ctypes.data + first * x_row
            if num - first == 1:
                out[first, row] = _dot_one(weights, num_bits, at, num_columns) * scale + shift
            else:
                # Beyond the last row of x that row is taken again.
                left = num - 1 - first
                second, third, fourth = at + x_row, at + min(2, left) * x_row, at + min(3, left) * x_row
                sums = _dot_four(weights, num_bits, at, second, third, fourth, num_columns)
                out[first, row] = sums[0] * scale + shift
                out[first + 1, row] = sums[1] * scale + shift
                if left > 1:
                    out[first + 2, row] = sums[2] * scale + shift
                if left > 2:
                    out[first + 3, row] = sums[3] * scale + shift
            first += _FEW


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
