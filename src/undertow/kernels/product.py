"""The float32 matrix product, written twice to show what caches do: naive, and blocked with a given block size.

In: a [m, k] and b [k, n], dense. Out: written into out [m, n]. Libraries (MKL, oneDNN) are faster, because a tile of
the output stays in registers; benchmarks/products.py compares.

Naive: each output element reads a column of b, one cache line per multiplication once b outgrows the cache.

Blocked (Lam, Rothberg, Wolf 1991): a block of b, size x size, is copied and used for every row of a before the next
block is read. It does 2 size^2 operations per row for size elements of a and of out each: the arithmetic intensity
grows with the size until the block (4 size^2 bytes) no longer fits in the cache. The inner loop multiplies four rows of
a with four rows of the block: one load from the block serves four multiplications, and so does one load of the output.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy
import torch

from undertow.kernels.compiler import cached_njit
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

_ROWS = 4

_loop: Any = cached_njit(fastmath={"contract"}, error_model="numpy")
_parallel: Any = cached_njit(parallel=True, fastmath={"contract"}, error_model="numpy")


@_parallel
def _naive(a: Any, b: Any, out: Any) -> None:
    for row in numba.prange(a.shape[0]):
        for column in range(b.shape[1]):
            total = numpy.float32(0)
            for inner in range(a.shape[1]):
                total += a[row, inner] * b[inner, column]
            out[row, column] = total


@_loop
def _four_by_four(a: Any, row: int, inner: int, block: Any, depth: int, out: Any, left: int, width: int) -> None:
    """out[row:row + 4, left:left + width] += a[row:row + 4, inner:inner + 4] @ block[depth:depth + 4]."""
    block, out = distinct(block), distinct(out)
    a00, a01, a02, a03 = a[row, inner], a[row, inner + 1], a[row, inner + 2], a[row, inner + 3]
    a10, a11, a12, a13 = a[row + 1, inner], a[row + 1, inner + 1], a[row + 1, inner + 2], a[row + 1, inner + 3]
    a20, a21, a22, a23 = a[row + 2, inner], a[row + 2, inner + 1], a[row + 2, inner + 2], a[row + 2, inner + 3]
    a30, a31, a32, a33 = a[row + 3, inner], a[row + 3, inner + 1], a[row + 3, inner + 2], a[row + 3, inner + 3]
    for offset in range(width):
        b0, b1, b2, b3 = (
            block[depth, offset],
            block[depth + 1, offset],
            block[depth + 2, offset],
            block[depth + 3, offset],
        )
        column = numpy.uint64(left + offset)
        out[row, column] = a03 * b3 + (a02 * b2 + (a01 * b1 + (a00 * b0 + out[row, column])))
        out[row + 1, column] = a13 * b3 + (a12 * b2 + (a11 * b1 + (a10 * b0 + out[row + 1, column])))
        out[row + 2, column] = a23 * b3 + (a22 * b2 + (a21 * b1 + (a20 * b0 + out[row + 2, column])))
        out[row + 3, column] = a33 * b3 + (a32 * b2 + (a31 * b1 + (a30 * b0 + out[row + 3, column])))


@_loop
def _one_by_one(a: Any, row: int, inner: int, block: Any, depth: int, out: Any, left: int, width: int) -> None:
    block, out = distinct(block), distinct(out)
    factor = a[row, inner]
    for offset in range(width):
        out[row, numpy.uint64(left + offset)] += factor * block[depth, offset]


@_loop
def _multiply_rows(a: Any, b: Any, size: int, first: int, last: int, block: Any, out: Any) -> None:
    inner_size, columns = b.shape
    for left in range(0, columns, size):
        width = min(size, columns - left)
        for top in range(0, inner_size, size):
            height = min(size, inner_size - top)
            for depth in range(height):
                for offset in range(width):
                    block[depth, offset] = b[top + depth, numpy.uint64(left + offset)]
            row = first
            while row + _ROWS <= last:
                depth = 0
                while depth + _ROWS <= height:
                    _four_by_four(a, row, top + depth, block, depth, out, left, width)
                    depth += _ROWS
                while depth < height:
                    for one in range(_ROWS):
                        _one_by_one(a, row + one, top + depth, block, depth, out, left, width)
                    depth += 1
                row += _ROWS
            while row < last:
                for depth in range(height):
                    _one_by_one(a, row, top + depth, block, depth, out, left, width)
                row += 1


@_parallel
def _blocked(a: Any, b: Any, size: int, blocks: Any, out: Any) -> None:
    num_parts = blocks.shape[0]
    part_rows = (a.shape[0] // num_parts // _ROWS + 1) * _ROWS
    for index in numba.prange(num_parts):
        part: Any = numpy.int64(index)
        first, last = min(a.shape[0], part * part_rows), min(a.shape[0], (part + 1) * part_rows)
        out[first:last] = 0
        _multiply_rows(a, b, size, first, last, blocks[part], out)


def multiply_naive(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b, element by element."""
    run_parallel(_naive, a.detach().numpy(), b.detach().numpy(), out.numpy())


def multiply_blocked(a: torch.Tensor, b: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
    """out = a @ b, in blocks of b of block_size x block_size; each thread has a share of the rows of a."""
    if block_size < 1:
        raise ValueError(f"multiply_blocked: a block size of at least 1 was required; found {block_size}")
    # A few columns more than needed, since rows a power of two apart compete for the same cache set.
    blocks = torch.empty(torch.get_num_threads(), block_size, block_size + 16)
    run_parallel(_blocked, a.detach().numpy(), b.detach().numpy(), block_size, blocks.numpy(), out.numpy())
