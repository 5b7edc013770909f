"""Softmax cross entropy over [rows, classes] float32 logits with int64 targets, without storing the log-softmax.

Forward, in: logits and targets; out: the loss and each row's logsumexp. Backward, in: all of these and the loss's
cotangent; out: ct_logits, which may be the logits' own memory. Each pass reads the logits once.

    loss = sum over rows of (logsumexp - logit of target), divided by the number of rows for "mean"
    ct_logit = (e^(logit - logsumexp) - [is target]) * ct_loss / number of rows

The logsumexp is computed online, block by block, and rescaled when the maximum rises (Milakov, Gimelshein 2018). Sums
within a block are in float32 vectors, sums across blocks and rows in float64. Rows whose target is `ignore_index` do
not count. Not done: label smoothing, class weights, targets as probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from undertow.kernels.compiler import cached_njit, numba
from undertow.kernels.float_functions import exp
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

# Columns of one block: they stay in the L1 cache between the maximum and the sum.
_BLOCK_COLUMNS = 2048
# Separate maxima per row, since LLVM does not vectorise a maximum that respects NaN.
_LANES = 64

_loop: Any = cached_njit(fastmath={"contract"}, error_model="numpy")
_reduction: Any = cached_njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
_parallel: Any = cached_njit(parallel=True, fastmath={"contract"}, error_model="numpy")


@_loop
def _maximum(logits: Any, row: int, first: int, last: int, lanes: Any) -> Any:
    logits, lanes = distinct(logits), distinct(lanes)
    lowest = numpy.float32(-numpy.inf)
    for lane in range(_LANES):
        lanes[lane] = lowest
    start = first
    while start + _LANES <= last:
        for lane in range(_LANES):
            value = logits[row, numpy.uint64(start + lane)]
            lanes[lane] = value if value > lanes[lane] else lanes[lane]
        start += _LANES
    best = lowest
    for column in range(start, last):
        best = logits[row, column] if logits[row, column] > best else best
    for lane in range(_LANES):
        best = lanes[lane] if lanes[lane] > best else best
    return best


@_reduction
def _sum_exp(logits: Any, row: int, first: int, last: int, shift: Any) -> Any:
    total = numpy.float32(0)
    for offset in range(last - first):
        total += exp(logits[row, numpy.uint64(first + offset)] - shift)
    return total


@_loop
def _logsumexp(logits: Any, row: int, lanes: Any) -> Any:
    classes = logits.shape[1]
    total, shift = 0.0, numpy.float32(0)
    for first in range(0, classes, _BLOCK_COLUMNS):
        last = min(classes, first + _BLOCK_COLUMNS)
        highest = _maximum(logits, row, first, last, lanes)
        # A block of minus infinities adds nothing and must not become the shift.
        if highest > numpy.float32(-numpy.inf) and (total == 0.0 or highest > shift):
            total *= math.exp(numpy.float64(shift) - numpy.float64(highest)) if total > 0.0 else 1.0
            shift = highest
        total += numpy.float64(_sum_exp(logits, row, first, last, shift))
    return numpy.float64(shift) + math.log(total)


@_parallel
def _forward(logits: Any, targets: Any, ignored: int, losses: Any, logsumexps: Any) -> None:
    for index in numba.prange(logits.shape[0]):
        row: Any = numpy.int64(index)
        lanes = numpy.empty(_LANES, numpy.float32)
        if targets[row] == ignored:
            losses[row] = 0.0
            logsumexps[row] = 0
        else:
            whole = _logsumexp(logits, row, lanes)
            losses[row] = whole - numpy.float64(logits[row, targets[row]])
            logsumexps[row] = whole


@_loop
def _differentiate_row(logits: Any, row: int, logsumexp: Any, scale: Any, ct_logits: Any) -> None:
    logits, ct_logits = distinct(logits), distinct(ct_logits)
    for column in range(logits.shape[1]):
        ct_logits[row, column] = exp(logits[row, column] - logsumexp) * scale


@_parallel
def _backward(logits: Any, targets: Any, ignored: int, logsumexps: Any, scale: Any, ct_logits: Any) -> None:
    for index in numba.prange(logits.shape[0]):
        row: Any = numpy.int64(index)
        if targets[row] == ignored:
            ct_logits[row] = 0
        else:
            target = targets[row]
            # Computed before the row is overwritten. expm1 avoids cancellation where the target is nearly certain.
            at_target = math.expm1(numpy.float64(logits[row, target]) - numpy.float64(logsumexps[row]))
            _differentiate_row(logits, row, logsumexps[row], scale, ct_logits)
            ct_logits[row, target] = at_target * numpy.float64(scale)


def _num_counted(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, reduction: str) -> int:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross entropy: the reduction must be mean or sum; found {reduction!r}")
    counted = targets != ignore_index
    outside = counted & ((targets < 0) | (targets >= logits.shape[1]))
    if outside.any():
        found = targets[outside][0].item()
        raise IndexError(f"cross entropy: targets from 0 to {logits.shape[1] - 1} were required; found {found}")
    return int(counted.sum()) if reduction == "mean" else 1


def cross_entropy_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: str,
    loss: torch.Tensor,
    logsumexp: torch.Tensor,
) -> None:
    """Write the loss, a tensor of one element, and [rows] logsumexp. If no row counts, the mean is NaN."""
    count = _num_counted(logits, targets, ignore_index, reduction)
    losses = torch.empty(len(logits), dtype=torch.float64)
    run_parallel(
        _forward, logits.detach().numpy(), targets.numpy(), ignore_index, losses.numpy(), logsumexp.numpy()
    )  # fmt: skip
    loss.fill_((losses.sum() / count).item())


def cross_entropy_backward(
    ct_loss: float,
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    reduction: str,
    logsumexp: torch.Tensor,
    ct_logits: torch.Tensor,
) -> None:
    """Write ct_logits, which may be `logits` itself."""
    count = _num_counted(logits, targets, ignore_index, reduction)
    scale = numpy.float32(ct_loss / count if count else numpy.nan)
    arrays = logits.detach().numpy(), targets.numpy(), ignore_index, logsumexp.numpy(), scale
    run_parallel(_backward, *arrays, ct_logits.detach().numpy())
