"""Max pooling of dense channels_last activations, with the winner's position in its window as one byte.

In: x [N, H, W, C] float32, dense (the permuted view of a channels_last [N, C, H, W]). Out: the maxima and uint8 codes
[N, OH, OW, C], written into given tensors; code = row in window * window width + column in window, as in
`window_codes`. The winner is PyTorch's: the first of equal maxima, the last of several NaNs.

The backward pass gathers: for each input element it goes through the windows that cover it, in the order in which
PyTorch adds their cotangents, and adds those that the element won. So nothing is cleared first, no two threads write
the same element, and the bits are PyTorch's. With `y`, the maxima, it includes the backward pass of a ReLU before the
pooling: a cotangent passes only where its maximum is not <= 0.

All loops run along the channels. 2x2 and 3x3 windows inside the plane are unrolled. Not done: windows of more than 256
positions, which one byte cannot count.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from undertow.kernels.compiler import cached_njit, numba
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

Pair = tuple[int, int]

_loop: Any = cached_njit(error_model="numpy")
_parallel: Any = cached_njit(parallel=True, error_model="numpy")


@_loop
def _pool_any(
    x: Any, pixel: int, width: int, top: int, bottom: int, left: int, right: int, down: int, along: int, code: int,
    kernel_width: int, out: Any, codes: Any, position: int,
) -> None:  # fmt: skip
    """One window: rows top..bottom in steps of `down`, columns left..right in steps of `along`, first code `code`."""
    x, out, codes = distinct(x), distinct(out), distinct(codes)
    first_code = numpy.uint8(code)
    for channel in range(out.shape[1]):
        out[position, channel] = numpy.float32(-numpy.inf)
        codes[position, channel] = first_code
    row_code = code
    for row in range(top, bottom, down):
        this_code = row_code
        for column in range(left, right, along):
            source = pixel + row * width + column
            written = numpy.uint8(this_code)
            for channel in range(out.shape[1]):
                value, best = x[source, channel], out[position, channel]
                wins = value > best or value != value
                out[position, channel] = value if wins else best
                codes[position, channel] = written if wins else codes[position, channel]
            this_code += 1
        row_code += kernel_width


@_loop
def _pool_two(x: Any, source: int, width: int, out: Any, codes: Any, position: int) -> None:
    x, out, codes = distinct(x), distinct(out), distinct(codes)
    for channel in range(out.shape[1]):
        best = numpy.float32(-numpy.inf)
        code = numpy.int32(0)
        for index in range(4):
            value = x[source + (index // 2) * width + index % 2, channel]
            wins = value > best or value != value
            best = value if wins else best
            code = numpy.int32(index) if wins else code
        out[position, channel] = best
        codes[position, channel] = numpy.uint8(code)


@_loop
def _pool_three(x: Any, source: int, width: int, out: Any, codes: Any, position: int) -> None:
    x, out, codes = distinct(x), distinct(out), distinct(codes)
    for channel in range(out.shape[1]):
        best = numpy.float32(-numpy.inf)
        code = numpy.int32(0)
        for index in range(9):
            value = x[source + (index // 3) * width + index % 3, channel]
            wins = value > best or value != value
            best = value if wins else best
            code = numpy.int32(index) if wins else code
        out[position, channel] = best
        codes[position, channel] = numpy.uint8(code)


@_parallel
def _pool(
    x: Any, size: Pair, out_size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: Any, codes: Any
) -> None:
    height, width = size
    out_height, out_width = out_size
    is_dense = dilation[0] == 1 and dilation[1] == 1
    is_two = is_dense and kernel[0] == 2 and kernel[1] == 2
    is_three = is_dense and kernel[0] == 3 and kernel[1] == 3
    for line in numba.prange(out.shape[0] // out_width):
        down: Any = numpy.int64(line)
        pixel = (down // out_height) * height * width
        top = (down % out_height) * stride[0] - padding[0]
        bottom = top + (kernel[0] - 1) * dilation[0] + 1
        skipped_rows = (max(0, -top) + dilation[0] - 1) // dilation[0]
        for column in range(out_width):
            left = column * stride[1] - padding[1]
            right = left + (kernel[1] - 1) * dilation[1] + 1
            position = down * out_width + column
            is_inside = top >= 0 and left >= 0 and bottom <= height and right <= width
            if is_inside and is_two:
                _pool_two(x, pixel + top * width + left, width, out, codes, position)
            elif is_inside and is_three:
                _pool_three(x, pixel + top * width + left, width, out, codes, position)
            else:
                skipped = (max(0, -left) + dilation[1] - 1) // dilation[1]
                _pool_any(
                    x, pixel, width, top + skipped_rows * dilation[0], min(bottom, height),
                    left + skipped * dilation[1], min(right, width), dilation[0], dilation[1],
                    skipped_rows * kernel[1] + skipped, kernel[1], out, codes, position,
                )  # fmt: skip


@_loop
def _gather(
    ct: Any, y: Any, has_y: bool, codes: Any, position: int, code: int, is_first: bool, ct_x: Any, pixel: int
) -> None:
    """Add ct where the window's winner is `code`; the first window of a pixel writes instead of adding."""
    ct, y, codes, ct_x = distinct(ct), distinct(y), distinct(codes), distinct(ct_x)
    zero, wanted = numpy.float32(0), numpy.uint8(code)
    if is_first and has_y:
        for channel in range(ct.shape[1]):
            wins = codes[position, channel] == wanted and not (y[position, channel] <= 0)
            # PyTorch adds to zero, which turns minus zero into zero.
            ct_x[pixel, channel] = zero + (ct[position, channel] if wins else zero)
    elif is_first:
        for channel in range(ct.shape[1]):
            ct_x[pixel, channel] = zero + (ct[position, channel] if codes[position, channel] == wanted else zero)
    elif has_y:
        for channel in range(ct.shape[1]):
            wins = codes[position, channel] == wanted and not (y[position, channel] <= 0)
            ct_x[pixel, channel] += ct[position, channel] if wins else zero
    else:
        for channel in range(ct.shape[1]):
            ct_x[pixel, channel] += ct[position, channel] if codes[position, channel] == wanted else zero


@_parallel
def _unpool(
    ct: Any, y: Any, has_y: bool, codes: Any, size: Pair, out_size: Pair, kernel: Pair, stride: Pair, padding: Pair,
    dilation: Pair, ct_x: Any,
) -> None:  # fmt: skip
    height, width = size
    out_height, out_width = out_size
    for line in numba.prange(ct_x.shape[0] // width):
        index: Any = numpy.int64(line)
        row = index % height + padding[0]
        windows = (index // height) * out_height
        top = max(0, (row - (kernel[0] - 1) * dilation[0] + stride[0] - 1) // stride[0])
        bottom = min(out_height, row // stride[0] + 1)
        for column in range(width):
            pixel = index * width + column
            along = column + padding[1]
            left = max(0, (along - (kernel[1] - 1) * dilation[1] + stride[1] - 1) // stride[1])
            right = min(out_width, along // stride[1] + 1)
            is_first = True
            for out_row in range(top, bottom):
                down = row - out_row * stride[0]
                if down % dilation[0]:
                    continue
                for out_column in range(left, right):
                    across = along - out_column * stride[1]
                    if across % dilation[1]:
                        continue
                    code = (down // dilation[0]) * kernel[1] + across // dilation[1]
                    position = (windows + out_row) * out_width + out_column
                    _gather(ct, y, has_y, codes, position, code, is_first, ct_x, pixel)
                    is_first = False
            if is_first:
                ct_x[pixel] = 0


def _flat(tensor: torch.Tensor) -> Any:
    return tensor.detach().view(-1, tensor.shape[3]).numpy()


def _check_kernel(kernel: Pair) -> None:
    if kernel[0] * kernel[1] > 256:
        raise ValueError(
            f"max pooling with one-byte codes: a window of at most 256 positions was required, found {kernel}"
        )


def max_pool_forward(
    x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out: torch.Tensor, codes: torch.Tensor
) -> None:
    """Maxima and codes of every window; x, out and codes are [N, H, W, C]."""
    _check_kernel(kernel)
    size, out_size = (x.shape[1], x.shape[2]), (out.shape[1], out.shape[2])
    run_parallel(_pool, _flat(x), size, out_size, kernel, stride, padding, dilation, _flat(out), _flat(codes))


def max_pool_backward(
    ct: torch.Tensor,
    codes: torch.Tensor,
    y: torch.Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ct_x: torch.Tensor,
) -> None:
    """The cotangent of the pooled tensor or, with `y` (the maxima), of the input of the ReLU before the pooling."""
    _check_kernel(kernel)
    size, out_size = (ct_x.shape[1], ct_x.shape[2]), (ct.shape[1], ct.shape[2])
    flat_ct = _flat(ct)
    run_parallel(
        _unpool, flat_ct, flat_ct if y is None else _flat(y), y is not None, _flat(codes), size, out_size, kernel,
        stride, padding, dilation, _flat(ct_x),
    )  # fmt: skip
