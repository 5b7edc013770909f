"""Batch normalisation of dense channels_last activations, with residual add and ReLU in the same pass over memory.

In: activations as [rows, channels] float32 (`rows_of` gives the view of an [N, C, H, W] tensor), weight and bias per
channel. Out: written into the given tensors; only a few rows are allocated. Training reads memory twice: for the
statistics, then to normalise, add and clamp. Outputs may lie in the memory of an input that is no longer needed.

Statistics: sums of x - s and (x - s)^2 over a block of rows in float32, joined across blocks in float64 (Chan, Golub,
LeVeque 1983). The shift s of a block is the mean of the block before it. Then the sum over blocks of
n (s - mean of block)^2 is at most 4 sum (x - mean)^2: the squares that are rounded sum to at most 5 times the wanted
squares, so neither a large mean nor many rows cost digits. Only the first block of a chunk is read twice, for its own
mean. Blocks and chunks depend on the shape alone: any number of threads gives the same bits.

Narrow activations are folded: [rows, channels] is the same memory as [rows / fold, fold * channels], whose inner loop
is long enough for vectors. Not done: other dtypes than float32, other devices than the CPU, other layouts.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from undertow.kernels.compiler import cached_njit, numba
from undertow.kernels.streaming import distinct, finish_stores, is_streamed, store_row
from undertow.kernels.threads import run_parallel

# Rows summed in float32 before float64 takes over: at most 32 roundings.
_BLOCK_ROWS = 32
# The number of separate partial results, and so the most threads that can help.
_MAX_CHUNKS = 16
# Columns from which the inner loop's start-up no longer shows; wider folds were slower to write (measured on Zen 4).
_WIDE_COLUMNS = 256
# Columns worked on together, so that the vectors per column stay in the L1 cache from row to row.
_PANEL_COLUMNS = 1024
# Columns added to workspace rows: rows a multiple of 4096 bytes apart compete for the same cache set, and a load waits
# for a store to the same offset in another page.
_PADDING = 80

Optional = torch.Tensor | None

_loop: Any = cached_njit(fastmath={"contract"}, error_model="numpy")
_parallel: Any = cached_njit(parallel=True, fastmath={"contract"}, error_model="numpy")


@_loop
def _first_shift(x: Any, first: int, last: int, shift: Any) -> None:
    x, shift = distinct(x), distinct(shift)
    inverse = numpy.float32(1) / numpy.float32(last - first)
    shift[:] = 0
    for row in range(first, last):
        for column in range(x.shape[1]):
            shift[column] += x[row, column]
    for column in range(x.shape[1]):
        mean = shift[column] * inverse
        shift[column] = mean if abs(mean) < numpy.float32(numpy.inf) else numpy.float32(0)


@_loop
def _add_moments(x: Any, first: int, last: int, shift: Any, center: Any, sums: Any, squares: Any, totals: Any) -> None:
    """Add sum(x - center) and sum((x - center)^2) to the totals, then set the shift to this block's mean."""
    width = x.shape[1]
    x, shift, sums, squares = distinct(x), distinct(shift), distinct(sums), distinct(squares)
    center, totals = distinct(center), distinct(totals)
    sums[:] = 0
    squares[:] = 0
    row = first
    while row + 4 <= last:
        for column in range(width):
            middle = shift[column]
            one, two = x[row, column] - middle, x[row + 1, column] - middle
            three, four = x[row + 2, column] - middle, x[row + 3, column] - middle
            sums[column] += (one + two) + (three + four)
            squares[column] += (one * one + two * two) + (three * three + four * four)
        row += 4
    while row < last:
        for column in range(width):
            one = x[row, column] - shift[column]
            sums[column] += one
            squares[column] += one * one
        row += 1
    # With d = x - shift, s = shift - center:  sum(x - center) = sum(d) + n s
    #                                          sum((x - center)^2) = sum(d^2) + 2 s sum(d) + n s^2
    count = numpy.float64(last - first)
    inverse = numpy.float32(1) / numpy.float32(last - first)
    for column in range(width):
        distance = numpy.float64(shift[column]) - numpy.float64(center[column])
        deviation = numpy.float64(sums[column])
        totals[0, column] += deviation + count * distance
        totals[1, column] += numpy.float64(squares[column]) + (deviation + deviation + count * distance) * distance
        mean = shift[column] + sums[column] * inverse
        shift[column] = mean if abs(mean) < numpy.float32(numpy.inf) else shift[column]


@_loop
def _join(totals: Any, channels: int) -> None:
    """Leave the sums over all chunks and folds in totals[0, :, :channels]."""
    totals = distinct(totals)
    for chunk in range(1, totals.shape[0]):
        for moment in range(2):
            for column in range(totals.shape[2]):
                totals[0, moment, column] += totals[chunk, moment, column]
    for moment in range(2):
        for start in range(channels, totals.shape[2], channels):
            for channel in range(channels):
                totals[0, moment, channel] += totals[0, moment, start + channel]


@_loop
def _finish_moments(
    totals: Any, center: Any, count: Any, epsilon: Any, momentum: Any, weight: Any, bias: Any,
    running_mean: Any, running_var: Any, mean: Any, inverse_std: Any, tiled: Any,
) -> None:  # fmt: skip
    """Join the chunks: statistics, running statistics, and the factors of every column of a folded row."""
    channels = mean.size
    _join(totals, channels)
    for channel in range(channels):
        total, squares = totals[0, 0, channel], totals[0, 1, channel]
        exact = numpy.float64(center[channel]) + total / count
        deviation = squares - total * total / count
        # Rounding may leave a negative number; a NaN stays.
        variance = (0.0 if deviation < 0 else deviation) / count
        inverse = 1.0 / numpy.sqrt(variance + epsilon)
        mean[channel] = exact
        inverse_std[channel] = inverse
        if running_mean.size:
            running_mean[channel] = momentum * exact + (1.0 - momentum) * running_mean[channel]
        if running_var.size:
            unbiased = variance * (count / (count - 1.0))
            running_var[channel] = momentum * unbiased + (1.0 - momentum) * running_var[channel]
        scale = inverse * weight[channel] if weight.size else inverse
        # The part of the mean that float32 cannot represent goes into the shift.
        shift = (numpy.float64(mean[channel]) - exact) * scale
        if bias.size:
            shift += bias[channel]
        for column in range(channel, totals.shape[2], channels):
            tiled[0, column], tiled[1, column], tiled[2, column] = mean[channel], scale, shift


@_loop
def _normalise_panel(
    x: Any, row: int, start: int, width: int, tiled: Any, lowest: Any, out: Any, out_row: int, out_start: int
) -> None:
    x, tiled, out = distinct(x), distinct(tiled), distinct(out)
    for index in range(width):
        column = numpy.uint64(start + index)
        value = (x[row, column] - tiled[0, column]) * tiled[1, column] + tiled[2, column]
        out[out_row, numpy.uint64(out_start + index)] = lowest if value <= lowest else value


@_loop
def _normalise_add_panel(
    x: Any,
    row: int,
    start: int,
    width: int,
    tiled: Any,
    residual: Any,
    lowest: Any,
    out: Any,
    out_row: int,
    out_start: int,
) -> None:
    x, tiled, residual, out = distinct(x), distinct(tiled), distinct(residual), distinct(out)
    for index in range(width):
        column = numpy.uint64(start + index)
        value = (x[row, column] - tiled[0, column]) * tiled[1, column] + tiled[2, column] + residual[row, column]
        out[out_row, numpy.uint64(out_start + index)] = lowest if value <= lowest else value


@_loop
def _normalise_chunk(
    x: Any, first: int, last: int, tiled: Any, residual: Any, has_residual: bool, lowest: Any, buffer: Any, chunk: int,
    streams: bool, out: Any,
) -> None:  # fmt: skip
    for start in range(0, x.shape[1], _PANEL_COLUMNS):
        width = min(_PANEL_COLUMNS, x.shape[1] - start)
        for row in range(first, last):
            target, target_row, target_start = (buffer, chunk, 0) if streams else (out, row, start)
            if has_residual:
                _normalise_add_panel(x, row, start, width, tiled, residual, lowest, target, target_row, target_start)
            else:
                _normalise_panel(x, row, start, width, tiled, lowest, target, target_row, target_start)
            if streams:
                store_row(buffer, chunk, out, row, start, width)
    finish_stores()


@_parallel
def _normalise(
    x: Any,
    tiled: Any,
    residual: Any,
    has_residual: bool,
    lowest: Any,
    chunk_rows: int,
    buffer: Any,
    streams: bool,
    out: Any,
) -> None:
    rows = x.shape[0]
    for index in numba.prange(buffer.shape[0]):
        chunk: Any = numpy.int64(index)
        first, last = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        _normalise_chunk(x, first, last, tiled, residual, has_residual, lowest, buffer, chunk, streams, out)


@_parallel
def _train(
    x: Any, center: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, epsilon: Any,
    count: Any, residual: Any, has_residual: bool, lowest: Any, chunk_rows: int, work: Any, totals: Any, tiled: Any,
    streams: bool, mean: Any, inverse_std: Any, out: Any,
) -> None:  # fmt: skip
    rows = x.shape[0]
    for index in numba.prange(totals.shape[0]):
        chunk: Any = numpy.int64(index)
        totals[chunk] = 0
        first, end = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        shift, sums, squares = work[chunk], work[totals.shape[0] + chunk], work[2 * totals.shape[0] + chunk]
        _first_shift(x, first, min(end, first + _BLOCK_ROWS), shift)
        while first < end:
            last = min(end, first + _BLOCK_ROWS)
            _add_moments(x, first, last, shift, center, sums, squares, totals[chunk])
            first = last
    _finish_moments(
        totals, center, count, epsilon, momentum, weight, bias, running_mean, running_var, mean, inverse_std, tiled
    )
    for index in numba.prange(totals.shape[0]):
        chunk = numpy.int64(index)
        first, last = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        _normalise_chunk(x, first, last, tiled, residual, has_residual, lowest, work, chunk, streams, out)


@_loop
def _add_products(ct: Any, x: Any, first: int, last: int, mean: Any, sums: Any, products: Any) -> None:
    ct, x, mean, sums, products = distinct(ct), distinct(x), distinct(mean), distinct(sums), distinct(products)
    row = first
    while row + 2 <= last:
        for column in range(ct.shape[1]):
            one, two = ct[row, column], ct[row + 1, column]
            sums[column] += one + two
            products[column] += one * (x[row, column] - mean[column]) + two * (x[row + 1, column] - mean[column])
        row += 2
    while row < last:
        for column in range(ct.shape[1]):
            sums[column] += ct[row, column]
            products[column] += ct[row, column] * (x[row, column] - mean[column])
        row += 1


@_loop
def _mask_rows(ct: Any, y: Any, first: int, last: int, masked: Any) -> None:
    ct, y, masked = distinct(ct), distinct(y), distinct(masked)
    for row in range(first, last):
        for column in range(ct.shape[1]):
            masked[row, column] = numpy.float32(0) if y[row, column] <= 0 else ct[row, column]


@_loop
def _add_masked_products(ct: Any, x: Any, y: Any, first: int, last: int, mean: Any, sums: Any, products: Any) -> None:
    ct, x, y, mean, sums, products = (
        distinct(ct), distinct(x), distinct(y), distinct(mean), distinct(sums), distinct(products)
    )  # fmt: skip
    zero = numpy.float32(0)
    row = first
    while row + 2 <= last:
        for column in range(ct.shape[1]):
            one = zero if y[row, column] <= 0 else ct[row, column]
            two = zero if y[row + 1, column] <= 0 else ct[row + 1, column]
            sums[column] += one + two
            products[column] += one * (x[row, column] - mean[column]) + two * (x[row + 1, column] - mean[column])
        row += 2
    while row < last:
        for column in range(ct.shape[1]):
            one = zero if y[row, column] <= 0 else ct[row, column]
            sums[column] += one
            products[column] += one * (x[row, column] - mean[column])
        row += 1


@_loop
def _finish_products(
    totals: Any, count: Any, weight: Any, mean: Any, inverse_std: Any, ct_weight: Any, ct_bias: Any, tiled: Any
) -> None:
    """The sums over all rows, and ct_x = tiled[1] g + tiled[2] (x - tiled[0]) + tiled[3] for every folded column."""
    channels = ct_bias.size
    _join(totals, channels)
    for channel in range(channels):
        total, product = totals[0, 0, channel], totals[0, 1, channel]
        inverse = numpy.float64(inverse_std[channel])
        scale = inverse * weight[channel] if weight.size else inverse
        ct_bias[channel] = total
        ct_weight[channel] = product * inverse
        for column in range(channel, totals.shape[2], channels):
            tiled[1, column] = scale
            tiled[2, column] = -scale * inverse * inverse * product / count
            tiled[3, column] = -scale * total / count


@_loop
def _differentiate_panel(
    ct: Any, x: Any, row: int, start: int, width: int, tiled: Any, ct_x: Any, out_row: int, out_start: int
) -> None:
    ct, x, tiled, ct_x = distinct(ct), distinct(x), distinct(tiled), distinct(ct_x)
    for index in range(width):
        column = numpy.uint64(start + index)
        linear = tiled[2, column] * (x[row, column] - tiled[0, column]) + tiled[3, column]
        ct_x[out_row, numpy.uint64(out_start + index)] = tiled[1, column] * ct[row, column] + linear


@_loop
def _differentiate_masked_panel(
    ct: Any, x: Any, y: Any, row: int, start: int, width: int, tiled: Any, ct_x: Any, out_row: int, out_start: int
) -> None:
    ct, x, y, tiled, ct_x = distinct(ct), distinct(x), distinct(y), distinct(tiled), distinct(ct_x)
    for index in range(width):
        column = numpy.uint64(start + index)
        linear = tiled[2, column] * (x[row, column] - tiled[0, column]) + tiled[3, column]
        passed = numpy.float32(0) if y[row, column] <= 0 else ct[row, column]
        ct_x[out_row, numpy.uint64(out_start + index)] = tiled[1, column] * passed + linear


@_loop
def _differentiate_chunk(
    ct: Any,
    x: Any,
    y: Any,
    has_y: bool,
    first: int,
    last: int,
    tiled: Any,
    buffer: Any,
    chunk: int,
    streams: bool,
    ct_x: Any,
) -> None:
    for start in range(0, x.shape[1], _PANEL_COLUMNS):
        width = min(_PANEL_COLUMNS, x.shape[1] - start)
        for row in range(first, last):
            target, target_row, target_start = (buffer, chunk, 0) if streams else (ct_x, row, start)
            if has_y:
                _differentiate_masked_panel(ct, x, y, row, start, width, tiled, target, target_row, target_start)
            else:
                _differentiate_panel(ct, x, row, start, width, tiled, target, target_row, target_start)
            if streams:
                store_row(buffer, chunk, ct_x, row, start, width)
    finish_stores()


@_parallel
def _backward(
    ct: Any, x: Any, y: Any, has_y: bool, masked: Any, writes_masked: bool, weight: Any, mean: Any, inverse_std: Any,
    count: Any, chunk_rows: int, work: Any, totals: Any, tiled: Any, streams: bool, ct_weight: Any, ct_bias: Any,
    ct_x: Any,
) -> None:  # fmt: skip
    rows = x.shape[0]
    for index in numba.prange(totals.shape[0]):
        chunk: Any = numpy.int64(index)
        totals[chunk] = 0
        end = min(rows, (chunk + 1) * chunk_rows)
        sums, products = work[chunk], work[totals.shape[0] + chunk]
        for first in range(chunk * chunk_rows, end, _BLOCK_ROWS):
            last = min(end, first + _BLOCK_ROWS)
            sums[:] = 0
            products[:] = 0
            if writes_masked:
                _mask_rows(ct, y, first, last, masked)
                _add_products(masked, x, first, last, tiled[0], sums, products)
            elif has_y:
                _add_masked_products(ct, x, y, first, last, tiled[0], sums, products)
            else:
                _add_products(ct, x, first, last, tiled[0], sums, products)
            for column in range(x.shape[1]):
                totals[chunk, 0, column] += numpy.float64(sums[column])
                totals[chunk, 1, column] += numpy.float64(products[column])
    _finish_products(totals, count, weight, mean, inverse_std, ct_weight, ct_bias, tiled)
    for index in numba.prange(totals.shape[0]):
        chunk = numpy.int64(index)
        first, last = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        if writes_masked:
            _differentiate_chunk(masked, x, y, False, first, last, tiled, work, chunk, streams, ct_x)
        else:
            _differentiate_chunk(ct, x, y, has_y, first, last, tiled, work, chunk, streams, ct_x)


_EMPTY = numpy.empty(0, numpy.float32)


def _vector(tensor: Optional) -> Any:
    return _EMPTY if tensor is None else tensor.detach().numpy()


def rows_of(activations: torch.Tensor) -> torch.Tensor:
    """The [rows, channels] view of a dense channels_last [N, C, H, W] tensor."""
    last = activations.permute(0, 2, 3, 1)
    if not last.is_contiguous():
        raise ValueError(f"rows_of: a dense channels_last tensor was required, found strides {activations.stride()}")
    return last.view(-1, last.shape[3])


class _Shape:
    """How [rows, channels] is folded and split; workspace of a few rows."""

    def __init__(self, rows: int, channels: int, num_tiled: int) -> None:
        fold = 1
        while rows % (2 * fold) == 0 and 2 * fold * channels <= _WIDE_COLUMNS:
            fold *= 2
        self.folded, self.width = rows // fold, fold * channels
        num_blocks = -(-self.folded // _BLOCK_ROWS)
        chunk_blocks = -(-num_blocks // _MAX_CHUNKS)
        self.chunk_rows, self.num_chunks = chunk_blocks * _BLOCK_ROWS, -(-num_blocks // chunk_blocks)
        self.fold = fold
        self.tiled = torch.empty(num_tiled, self.width + _PADDING).numpy()
        self.work = torch.empty(3 * self.num_chunks, self.width + _PADDING).numpy()
        self.totals = torch.empty(self.num_chunks, 2, self.width, dtype=torch.float64).numpy()

    def view(self, tensor: torch.Tensor) -> Any:
        return tensor.detach().view(self.folded, self.width).numpy()


def batch_norm_forward(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    epsilon: float,
    residual: Optional,
    has_relu: bool,
    out: torch.Tensor,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
) -> None:
    """Training: out = relu(normalised x * weight + bias + residual); mean and inverse_std as PyTorch saves them.

    running <- (1 - momentum) running + momentum batch, with the unbiased variance.
    """
    rows, channels = x.shape
    shape = _Shape(rows, channels, 3)
    first = x[0].detach()
    # Any finite value near the data will do.
    center = torch.where(first.isfinite(), first, 0.0).repeat(shape.fold).numpy()
    wide = shape.view(x)
    run_parallel(
        _train, wide, center, _vector(weight), _vector(bias), _vector(running_mean), _vector(running_var),
        float(momentum), float(epsilon), float(rows), wide if residual is None else shape.view(residual),
        residual is not None, _lowest(has_relu), shape.chunk_rows, shape.work, shape.totals, shape.tiled,
        is_streamed(out), mean.numpy(), inverse_std.numpy(), shape.view(out),
    )  # fmt: skip


def batch_norm_evaluate(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    epsilon: float,
    residual: Optional,
    has_relu: bool,
    out: torch.Tensor,
) -> None:
    """One pass: out = relu((x - running_mean) / sqrt(running_var + epsilon) * weight + bias + residual)."""
    shape = _Shape(x.shape[0], x.shape[1], 3)
    scale = (running_var.detach().double() + epsilon).rsqrt()
    if weight is not None:
        scale *= weight.detach()
    tiled = torch.from_numpy(shape.tiled)[:, : shape.width].unflatten(1, (shape.fold, x.shape[1]))
    tiled[0] = running_mean.detach()
    tiled[1] = scale
    tiled[2] = 0 if bias is None else bias.detach()
    wide = shape.view(x)
    run_parallel(
        _normalise, wide, shape.tiled, wide if residual is None else shape.view(residual), residual is not None,
        _lowest(has_relu), shape.chunk_rows, shape.work[: shape.num_chunks], is_streamed(out), shape.view(out),
    )  # fmt: skip


def _lowest(has_relu: bool) -> Any:
    """The value to clamp at. At minus infinity nothing changes, so one loop serves with and without ReLU. NaNs pass."""
    return numpy.float32(0 if has_relu else -numpy.inf)


def batch_norm_backward(
    ct: torch.Tensor,
    x: torch.Tensor,
    weight: Optional,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
    y: Optional,
    ct_x: torch.Tensor,
    ct_weight: torch.Tensor,
    ct_bias: torch.Tensor,
    ct_residual: Optional,
) -> None:
    """Cotangents of the training form. With `y`, the output after a ReLU, ct counts only where y is not <= 0.

    `ct_residual` gets the masked ct. Without a ReLU it would be ct itself, so it must be None.

    With g the masked ct, d = x - mean, i = inverse_std, n rows:
        ct_bias = sum(g)        ct_weight = i sum(g d)        ct_x = weight i (g - sum(g)/n - d i^2 sum(g d)/n)
    """
    if ct_residual is not None and y is None:
        raise ValueError("batch_norm_backward: ct_residual was given without y; it would be ct itself, so give None")
    shape = _Shape(x.shape[0], x.shape[1], 4)
    torch.from_numpy(shape.tiled)[0, : shape.width].view(shape.fold, x.shape[1])[:] = mean
    wide = shape.view(x)
    run_parallel(
        _backward, shape.view(ct), wide, wide if y is None else shape.view(y), y is not None,
        wide if ct_residual is None else shape.view(ct_residual), ct_residual is not None, _vector(weight),
        mean.numpy(), inverse_std.numpy(), float(len(x)), shape.chunk_rows, shape.work, shape.totals, shape.tiled,
        is_streamed(ct_x),
        ct_weight.numpy(), ct_bias.numpy(), shape.view(ct_x),
    )  # fmt: skip
