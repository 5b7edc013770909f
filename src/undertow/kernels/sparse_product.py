"""Products with sparse weights of few values: a row at a time, a kept weight at a time.

In: weights in rows; a kept weight is its column and its code, 3 bytes for most layers, and its value `codebook[code]`.
Out: out[row, p] = scale[row] * sum over the row's weights of value * x[offset of its column + p] + bias[row].

Where a column begins in x is a table, so one loop serves products and convolutions. Of a product, x is transposed and
p runs over the batch. Of a convolution, x is padded, p runs over the pixels of the padded image from its first to its
last window, and a column's offset is that of its channel and tap (Park et al., "Faster CNNs with direct sparse
convolutions and guided pruning", ICLR 2017); what lies between two rows of windows is computed and dropped. With
strides, the image is first divided into its phases. A batch of one takes another loop, which gathers 16 elements of x.

Sums are rounded in another order than dense ones: both are within n 2^-24 of the sum of the n magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy
import torch
from torch import Tensor

from undertow.kernels.compiler import cached_njit
from undertow.kernels.sparse_tiles import make_sparse_kernel
from undertow.kernels.threads import run_parallel

_GROUP = 512  # positions for which a row's entries are prepared once
_ROWS = 64  # of a thread's block, which reads the same part of x

_eight = make_sparse_kernel(8)
_two = make_sparse_kernel(2)
_one = make_sparse_kernel(1)


@dataclass(frozen=True)
class SparseRows:
    """Weights [rows, columns], those that are kept."""

    starts: Tensor  # int64, where each row begins, and the end
    columns: Tensor  # uint16, or int32 where there are more
    codes: Tensor  # uint8 or uint16
    codebook: Tensor  # float32
    scales: Tensor  # float32, one per row

    def arrays(self) -> tuple[Any, ...]:
        """The parts as NumPy arrays, in the order of the loops' arguments."""
        return tuple(part.numpy() for part in (self.starts, self.columns, self.codes, self.codebook, self.scales))


@cached_njit(parallel=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _multiply_vector(
    starts: Any, columns: Any, codes: Any, codebook: Any, scales: Any, bias: Any, x: Any, out: Any
) -> None:
    for row in numba.prange(starts.size - 1):
        total = numpy.float32(0)
        for entry in range(numpy.uint64(starts[row]), numpy.uint64(starts[row + 1])):
            total += codebook[numpy.uint64(codes[entry])] * x[numpy.uint64(columns[entry])]
        out[row] = total * scales[row] + bias[row]


@cached_njit(parallel=True, error_model="numpy")
def _multiply(
    starts: Any, columns: Any, codes: Any, codebook: Any, scales: Any, bias: Any, x: Any, offsets: Any, scratch: Any,
    values: Any, out: Any,
) -> None:  # fmt: skip
    num_rows, num_positions = out.shape
    num_groups = (num_positions + _GROUP - 1) // _GROUP
    num_blocks = (num_rows + _ROWS - 1) // _ROWS
    for unit in numba.prange(num_groups * num_blocks):
        left, top = unit // num_blocks * _GROUP, unit % num_blocks * _ROWS
        right = min(left + _GROUP, num_positions)
        thread = numba.get_thread_id()
        own_offsets, own_values = scratch[thread], values[thread]
        for row in range(top, min(top + _ROWS, num_rows)):
            first = starts[row]
            num = starts[row + 1] - first
            for entry in range(num):
                at = numpy.uint64(first + entry)
                own_offsets[entry] = offsets[numpy.uint64(columns[at])]
                own_values[entry] = codebook[numpy.uint64(codes[at])]
            entries, weights = own_offsets.ctypes.data, own_values.ctypes.data
            source, target = x.ctypes.data, out.ctypes.data + 4 * row * num_positions
            scale, shift = scales[row], bias[row]
            position = left
            while position + 128 <= right:
                _eight(entries, weights, num, source + 4 * position, target + 4 * position, scale, shift)
                position += 128
            while position + 32 <= right:
                _two(entries, weights, num, source + 4 * position, target + 4 * position, scale, shift)
                position += 32
            while position < right:
                _one(entries, weights, num, source + 4 * position, target + 4 * position, scale, shift)
                position += 16


def multiply_sparse(weights: SparseRows, bias: Tensor, x: Tensor, offsets: Tensor, num_positions: int) -> Tensor:
    """out[row, p] for p below `num_positions`, a multiple of 16. x has as much after its last offset."""
    num_rows = len(weights.starts) - 1
    out = torch.empty(num_rows, num_positions)
    longest = int(weights.starts.diff().max()) if num_rows else 0
    scratch = numpy.empty((torch.get_num_threads(), longest + 8), numpy.int64)
    values = numpy.empty((torch.get_num_threads(), longest + 16), numpy.float32)
    run_parallel(_multiply, *weights.arrays(), bias.numpy(), x.numpy(), offsets.numpy(), scratch, values, out.numpy())
    return out


def multiply_sparse_vector(weights: SparseRows, bias: Tensor, x: Tensor) -> Tensor:
    """out[row] for one vector x, whose offsets are its columns."""
    out = torch.empty(len(weights.starts) - 1)
    run_parallel(_multiply_vector, *weights.arrays(), bias.numpy(), x.numpy(), out.numpy())
    return out
