"""Layer normalisation of [rows, columns] float32, each row read from memory once, with a residual add before it.

In: x, optionally a residual to add first, weight and bias per column. Out: written into given tensors: the normalised
rows, the mean and inverse standard deviation per row as PyTorch saves them, and with a residual also the sum
x + residual, because the backward pass and the next residual need it.

A row stays in the L1 cache while its mean, then its squared deviations, then its result are computed. Deviations from
the mean avoid cancellation. ct_weight and ct_bias are summed over 32 rows in float32, then in float64. Chunks of rows
depend on the shape alone, so any number of threads gives the same bits. Sums along a row are reordered into vectors.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from undertow.kernels.compiler import cached_njit, numba
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

_BLOCK_ROWS = 32
_MAX_CHUNKS = 16

Optional = torch.Tensor | None

_loop: Any = cached_njit(fastmath={"contract"}, error_model="numpy")
# These flags let LLVM split a sum into a vector of sums.
_reduction: Any = cached_njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
_parallel: Any = cached_njit(parallel=True, fastmath={"contract"}, error_model="numpy")


@_reduction
def _mean(x: Any, row: int) -> Any:
    total = numpy.float32(0)
    for column in range(x.shape[1]):
        total += x[row, column]
    return total / numpy.float32(x.shape[1])


@_reduction
def _mean_square(x: Any, row: int, mean: Any) -> Any:
    total = numpy.float32(0)
    for column in range(x.shape[1]):
        deviation = x[row, column] - mean
        total += deviation * deviation
    return total / numpy.float32(x.shape[1])


@_loop
def _add_row(x: Any, residual: Any, row: int, summed: Any) -> None:
    x, residual, summed = distinct(x), distinct(residual), distinct(summed)
    for column in range(x.shape[1]):
        summed[row, column] = x[row, column] + residual[row, column]


@_loop
def _normalise_row(x: Any, row: int, mean: Any, inverse: Any, weight: Any, bias: Any, out: Any) -> None:
    x, weight, bias, out = distinct(x), distinct(weight), distinct(bias), distinct(out)
    for column in range(x.shape[1]):
        out[row, column] = (x[row, column] - mean) * inverse * weight[column] + bias[column]


@_parallel
def _forward(
    x: Any, residual: Any, summed: Any, has_residual: bool, weight: Any, bias: Any, epsilon: Any, out: Any, means: Any,
    inverse_stds: Any,
) -> None:  # fmt: skip
    for index in numba.prange(x.shape[0]):
        row: Any = numpy.int64(index)
        if has_residual:
            _add_row(x, residual, row, summed)
        mean = _mean(summed, row)
        inverse = numpy.float32(1.0 / numpy.sqrt(numpy.float64(_mean_square(summed, row, mean)) + epsilon))
        means[row] = mean
        inverse_stds[row] = inverse
        _normalise_row(summed, row, mean, inverse, weight, bias, out)


@_reduction
def _mean_products(ct: Any, x: Any, row: int, mean: Any, inverse: Any, weight: Any) -> Any:
    """The means over the row of g and g xhat, with g = ct weight."""
    total, product = numpy.float32(0), numpy.float32(0)
    for column in range(x.shape[1]):
        scaled = ct[row, column] * weight[column]
        total += scaled
        product += scaled * ((x[row, column] - mean) * inverse)
    count = numpy.float32(x.shape[1])
    return total / count, product / count


@_loop
def _differentiate_row(
    ct: Any, x: Any, row: int, mean: Any, inverse: Any, total: Any, product: Any, weight: Any, sums: Any, products: Any,
    ct_x: Any,
) -> None:  # fmt: skip
    ct, x, weight, sums, products, ct_x = (
        distinct(ct), distinct(x), distinct(weight), distinct(sums), distinct(products), distinct(ct_x)
    )  # fmt: skip
    for column in range(x.shape[1]):
        normalised = (x[row, column] - mean) * inverse
        given = ct[row, column]
        sums[column] += given
        products[column] += given * normalised
        ct_x[row, column] = inverse * (given * weight[column] - total - normalised * product)


@_loop
def _add_to_totals(work: Any, totals: Any) -> None:
    work, totals = distinct(work), distinct(totals)
    for row in range(2):
        for column in range(work.shape[1]):
            totals[row, column] += numpy.float64(work[row, column])
            work[row, column] = 0


@_parallel
def _backward(
    ct: Any, x: Any, means: Any, inverse_stds: Any, weight: Any, chunk_rows: int, work: Any, totals: Any, ct_x: Any
) -> None:
    rows = x.shape[0]
    for index in numba.prange(totals.shape[0]):
        chunk: Any = numpy.int64(index)
        totals[chunk] = 0
        work[chunk] = 0
        first, last = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        for row in range(first, last):
            mean, inverse = means[row], inverse_stds[row]
            total, product = _mean_products(ct, x, row, mean, inverse, weight)
            _differentiate_row(ct, x, row, mean, inverse, total, product, weight, work[chunk, 0], work[chunk, 1], ct_x)
            if (row + 1) % _BLOCK_ROWS == 0 or row + 1 == last:
                _add_to_totals(work[chunk], totals[chunk])


def layer_norm_forward(
    x: torch.Tensor,
    residual: Optional,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
    summed: Optional,
) -> None:
    """out = (s - mean(s)) / sqrt(var(s) + epsilon) * weight + bias of every row, with s = x + residual in `summed`."""
    if (residual is None) != (summed is None):
        raise ValueError("layer_norm_forward: give both residual and summed, or neither")
    rows = x.detach().numpy()
    added = rows if residual is None else residual.detach().numpy()
    sums = rows if summed is None else summed.numpy()
    vectors = weight.detach().numpy(), bias.detach().numpy()
    run_parallel(
        _forward, rows, added, sums, residual is not None, *vectors, float(epsilon), out.numpy(), mean.numpy(),
        inverse_std.numpy(),
    )  # fmt: skip


def layer_norm_backward(
    ct: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
    weight: torch.Tensor,
    ct_x: torch.Tensor,
    ct_weight: torch.Tensor,
    ct_bias: torch.Tensor,
) -> None:
    """Cotangents, where x is what was normalised: with a residual that is `summed`, and ct_x is its cotangent too.

    With g = ct weight, h = (x - mean) inverse_std, means over the row:
        ct_x = inverse_std (g - mean(g) - h mean(g h))        ct_weight = sum(ct h)        ct_bias = sum(ct)
    """
    rows, columns = x.shape
    num_blocks = -(-rows // _BLOCK_ROWS)
    chunk_blocks = -(-num_blocks // _MAX_CHUNKS)
    num_chunks = -(-num_blocks // chunk_blocks)
    work = torch.empty(num_chunks, 2, columns)
    totals = torch.empty(num_chunks, 2, columns, dtype=torch.float64)
    run_parallel(
        _backward, ct.detach().numpy(), x.detach().numpy(), mean.numpy(), inverse_std.numpy(), weight.detach().numpy(),
        chunk_blocks * _BLOCK_ROWS, work.numpy(), totals.numpy(), ct_x.numpy(),
    )  # fmt: skip
    total = totals.sum(0)
    ct_bias.copy_(total[0])
    ct_weight.copy_(total[1])
