"""Batch normalisation a second time, from the statistics that the first run saved: EXACT, one pass instead of three.

In: float32 activations, contiguous or dense channels_last; weight and bias per channel; the saved mean and inverse
standard deviation; optionally a residual to add and bounds to clamp to. Out: a tensor with the bits that PyTorch's
kernels give one after the other.

PyTorch computes y = x a + b with a = inverse_std weight and b = bias - mean a, each in one rounding where the processor
has fused multiply-add; `contract` allows Numba to use it. The machine decides which of PyTorch's builds of the kernel
runs, so callers ask `has_pytorch_bits`, which compares the results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from undertow.kernels.compiler import HAS_NUMBA, cached_njit, numba
from undertow.kernels.outputs import Out, given
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

# Rows of a channels_last tensor that one iteration of the parallel loop handles.
_ROWS_PER_ITERATION = 64

_loop: Any = cached_njit(fastmath={"contract"}, error_model="numpy")
_parallel: Any = cached_njit(parallel=True, fastmath={"contract"}, error_model="numpy")


@_loop
def _find_factors(mean: Any, inverse_std: Any, weight: Any, bias: Any, scale: Any, shift: Any) -> None:
    for channel in range(mean.size):
        scale[channel] = inverse_std[channel] * weight[channel] if weight.size else inverse_std[channel]
        start = bias[channel] if bias.size else numpy.float32(0)
        shift[channel] = start - mean[channel] * scale[channel]


@_loop
def _clamp(value: Any, lowest: Any, highest: Any) -> Any:
    """A NaN and a negative zero pass, as they do in PyTorch."""
    value = lowest if value < lowest else value
    return highest if value > highest else value


@_loop
def _normalise_plane(x: Any, scale: Any, shift: Any, lowest: Any, highest: Any, out: Any) -> None:
    x, out = distinct(x), distinct(out)
    for index in range(x.size):
        out[index] = _clamp(x[index] * scale + shift, lowest, highest)


@_loop
def _normalise_add_plane(x: Any, scale: Any, shift: Any, residual: Any, lowest: Any, highest: Any, out: Any) -> None:
    x, residual, out = distinct(x), distinct(residual), distinct(out)
    for index in range(x.size):
        out[index] = _clamp((x[index] * scale + shift) + residual[index], lowest, highest)


@_parallel
def _normalise_planes(
    x: Any, scale: Any, shift: Any, residual: Any, has_residual: bool, lowest: Any, highest: Any, out: Any
) -> None:
    for index in numba.prange(x.shape[0]):
        plane: Any = numpy.int64(index)
        channel = plane % scale.size
        if has_residual:
            _normalise_add_plane(x[plane], scale[channel], shift[channel], residual[plane], lowest, highest, out[plane])
        else:
            _normalise_plane(x[plane], scale[channel], shift[channel], lowest, highest, out[plane])


@_loop
def _normalise_row(x: Any, scale: Any, shift: Any, lowest: Any, highest: Any, out: Any) -> None:
    x, scale, shift, out = distinct(x), distinct(scale), distinct(shift), distinct(out)
    for channel in range(x.size):
        out[channel] = _clamp(x[channel] * scale[channel] + shift[channel], lowest, highest)


@_loop
def _normalise_add_row(x: Any, scale: Any, shift: Any, residual: Any, lowest: Any, highest: Any, out: Any) -> None:
    x, scale, shift, residual, out = distinct(x), distinct(scale), distinct(shift), distinct(residual), distinct(out)
    for channel in range(x.size):
        out[channel] = _clamp((x[channel] * scale[channel] + shift[channel]) + residual[channel], lowest, highest)


@_parallel
def _normalise_rows(
    x: Any, scale: Any, shift: Any, residual: Any, has_residual: bool, lowest: Any, highest: Any, out: Any
) -> None:
    for index in numba.prange((x.shape[0] + _ROWS_PER_ITERATION - 1) // _ROWS_PER_ITERATION):
        first: Any = numpy.int64(index) * _ROWS_PER_ITERATION
        for row in range(first, min(x.shape[0], first + _ROWS_PER_ITERATION)):
            if has_residual:
                _normalise_add_row(x[row], scale, shift, residual[row], lowest, highest, out[row])
            else:
                _normalise_row(x[row], scale, shift, lowest, highest, out[row])


def normalise_again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse_std: Tensor,
    residual: Tensor | None = None,
    lowest: float = -numpy.inf,
    highest: float = numpy.inf,
    out: Out = None,
) -> Tensor:
    """clamp((x - mean) inverse_std weight + bias + residual), rounded as PyTorch rounds it."""
    y = given(out, 0, lambda: torch.empty_like(x))
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    _find_factors(mean.numpy(), inverse_std.numpy(), _vector(weight), _vector(bias), scale.numpy(), shift.numpy())
    is_contiguous = x.is_contiguous()
    view = _planes if is_contiguous else _rows
    run_parallel(
        _normalise_planes if is_contiguous else _normalise_rows,
        view(x), scale.numpy(), shift.numpy(), view(x if residual is None else residual), residual is not None,
        numpy.float32(lowest), numpy.float32(highest), view(y),
    )  # fmt: skip
    return y


def _vector(tensor: Tensor | None) -> Any:
    return numpy.empty(0, numpy.float32) if tensor is None else tensor.detach().contiguous().numpy()


def _planes(tensor: Tensor) -> Any:
    """[batch times channels, positions] of a contiguous tensor."""
    return tensor.detach().view(tensor.shape[0] * tensor.shape[1], -1).numpy()


def _rows(tensor: Tensor) -> Any:
    """[batch times positions, channels] of a dense channels_last tensor."""
    return tensor.detach().movedim(1, -1).view(-1, tensor.shape[1]).numpy()


@cache
def has_pytorch_bits() -> bool:
    """Whether `normalise_again` gives the bits of PyTorch's kernels on this machine."""
    if not HAS_NUMBA:
        return False
    plain: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    for shape in ((3, 5, 7, 9), (2, 37, 33, 31), (4, 16, 8, 8)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x, residual = (torch.randn(shape, **plain).to(memory_format=layout) for _ in range(2))
            weight, bias = (torch.randn(shape[1], **plain) for _ in range(2))
            y, mean, inverse_std = torch.native_batch_norm(3 * x + 1, weight, bias, None, None, True, 0.1, 1e-5)
            again = normalise_again(3 * x + 1, weight, bias, mean, inverse_std)
            joined = normalise_again(3 * x + 1, weight, bias, mean, inverse_std, residual, 0.0)
            if not torch.equal(again, y) or not torch.equal(joined, torch.relu(y + residual)):
                return False
    return True
