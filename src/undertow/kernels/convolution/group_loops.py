"""The loops of grouped convolutions: over lines of the result, groups, and pieces of a line.

In and out: addresses and sizes (integers). The forward pass and the cotangent of the input are the same sum over taps,

    result[q, o] = sum over taps t and channels c of the group of source[first(q) + t step, c] w[t, c, o]

The forward pass has first(q) = q stride - padding and step = dilation. For the cotangent of the input, the taps that
reach a pixel q depend on q modulo the stride: (q + padding - tap dilation) must be a multiple of it. Pixels of one such
phase have the same taps, lie beside each other in the cotangent, and the step is negative.

An axis is (stride, padding, dilation, number of taps, whether it is the cotangent's sum).
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.group_tiles import make_depthwise_kernel, make_row_kernel
from undertow.kernels.convolution.winograd_tiles import tail_bits

VECTOR_BYTES = 64
# Pixels of which the sums are in registers at once. Images are often multiples of 7 or 5 wide.
_MOST, _FEWER = 8, 5
CACHE_BYTES = (
    1 << 18
)  # of lines, so that they fit an L2 cache of 512 KiB with what else is there; no other size was tried

# By taps in a row, and columns from pixel to pixel. One, two and four taps are those of a stride of 2, backwards.
_three_taps = make_depthwise_kernel(_MOST, 3, 1, False)
_three_taps_checked = make_depthwise_kernel(_MOST, 3, 1, True)
_three_taps_few = make_depthwise_kernel(_FEWER, 3, 1, True)
_five_taps = make_depthwise_kernel(_MOST, 5, 1, False)
_five_taps_checked = make_depthwise_kernel(_MOST, 5, 1, True)
_five_taps_few = make_depthwise_kernel(_FEWER, 5, 1, True)
_seven_taps = make_depthwise_kernel(_MOST, 7, 1, False)
_seven_taps_checked = make_depthwise_kernel(_MOST, 7, 1, True)
_seven_taps_few = make_depthwise_kernel(_FEWER, 7, 1, True)
_three_taps_by_two = make_depthwise_kernel(_MOST, 3, 2, False)
_three_taps_by_two_checked = make_depthwise_kernel(_MOST, 3, 2, True)
_three_taps_by_two_few = make_depthwise_kernel(_FEWER, 3, 2, True)
_five_taps_by_two = make_depthwise_kernel(_MOST, 5, 2, False)
_five_taps_by_two_checked = make_depthwise_kernel(_MOST, 5, 2, True)
_five_taps_by_two_few = make_depthwise_kernel(_FEWER, 5, 2, True)
_seven_taps_by_two = make_depthwise_kernel(_MOST, 7, 2, False)
_seven_taps_by_two_checked = make_depthwise_kernel(_MOST, 7, 2, True)
_seven_taps_by_two_few = make_depthwise_kernel(_FEWER, 7, 2, True)
_one_tap = make_depthwise_kernel(_MOST, 1, 1, False)
_one_tap_checked = make_depthwise_kernel(_MOST, 1, 1, True)
_one_tap_few = make_depthwise_kernel(_FEWER, 1, 1, True)
_two_taps = make_depthwise_kernel(_MOST, 2, 1, False)
_two_taps_checked = make_depthwise_kernel(_MOST, 2, 1, True)
_two_taps_few = make_depthwise_kernel(_FEWER, 2, 1, True)
_four_taps = make_depthwise_kernel(_MOST, 4, 1, False)
_four_taps_checked = make_depthwise_kernel(_MOST, 4, 1, True)
_four_taps_few = make_depthwise_kernel(_FEWER, 4, 1, True)
_any_taps = make_row_kernel(_MOST, 1, 1, True)
_pairs = make_row_kernel(_MOST, 2, 1, True)
_fours = make_row_kernel(_MOST, 4, 1, True)
_eights = make_row_kernel(_MOST, 8, 1, True)
_wide = make_row_kernel(_MOST, 0, 1, True)
_wide_two = make_row_kernel(_MOST, 0, 2, True)


@numba.njit(error_model="numpy")
def _reach(axis: Any, q: int) -> Any:
    """For the pixel q: its first place in the source, the step from tap to tap, the first tap, and the next."""
    stride, padding, dilation, num_taps, is_adjoint = axis
    if not is_adjoint:
        return q * stride - padding, dilation, 0, 1
    tap, next_tap = 0, 1
    while tap < num_taps and (q + padding - tap * dilation) % stride != 0:
        tap += 1
    while (next_tap * dilation) % stride != 0:
        next_tap += 1
    return (q + padding - tap * dilation) // stride, -(next_tap * dilation // stride), tap, next_tap


@numba.njit(error_model="numpy")
def _inside(first: int, step: int, num_steps: int, size: int) -> Any:
    """The steps t, from and up to, for which first + t step lies in the image."""
    start = 0
    while start < num_steps and not 0 <= first + start * step < size:
        start += 1
    end = start
    while end < num_steps and 0 <= first + end * step < size:
        end += 1
    return start, end


@numba.njit(error_model="numpy")
def band_lines(line_bytes: int, num_lines: int) -> int:
    """Lines of an image that are gone through for one vector of channels after the other: they stay in the cache."""
    return min(num_lines, max(8, CACHE_BYTES // line_bytes))


@numba.njit(error_model="numpy")
def _pixels_at_once(num_pixels: int) -> int:
    """How many pixels a piece of a line has, so that few are computed for nothing."""
    most, fewer = -(-num_pixels // _MOST) * _MOST, -(-num_pixels // _FEWER) * _FEWER
    return _FEWER if fewer < most else _MOST


@numba.njit(error_model="numpy")
def _add_depthwise(numbers: Any, num_taps: int, across: int, at_once: int, is_inside: bool) -> bool:
    """Run the kernel for so many taps, if there is one."""
    if num_taps == 3 and across == 1:
        if at_once == _FEWER:
            _three_taps_few(numbers)
        elif is_inside:
            _three_taps(numbers)
        else:
            _three_taps_checked(numbers)
        return True
    if num_taps == 5 and across == 1:
        if at_once == _FEWER:
            _five_taps_few(numbers)
        elif is_inside:
            _five_taps(numbers)
        else:
            _five_taps_checked(numbers)
        return True
    if num_taps == 7 and across == 1:
        if at_once == _FEWER:
            _seven_taps_few(numbers)
        elif is_inside:
            _seven_taps(numbers)
        else:
            _seven_taps_checked(numbers)
        return True
    if num_taps == 3 and across == 2:
        if at_once == _FEWER:
            _three_taps_by_two_few(numbers)
        elif is_inside:
            _three_taps_by_two(numbers)
        else:
            _three_taps_by_two_checked(numbers)
        return True
    if num_taps == 5 and across == 2:
        if at_once == _FEWER:
            _five_taps_by_two_few(numbers)
        elif is_inside:
            _five_taps_by_two(numbers)
        else:
            _five_taps_by_two_checked(numbers)
        return True
    if num_taps == 7 and across == 2:
        if at_once == _FEWER:
            _seven_taps_by_two_few(numbers)
        elif is_inside:
            _seven_taps_by_two(numbers)
        else:
            _seven_taps_by_two_checked(numbers)
        return True
    if num_taps == 1 and across == 1:
        if at_once == _FEWER:
            _one_tap_few(numbers)
        elif is_inside:
            _one_tap(numbers)
        else:
            _one_tap_checked(numbers)
        return True
    if num_taps == 2 and across == 1:
        if at_once == _FEWER:
            _two_taps_few(numbers)
        elif is_inside:
            _two_taps(numbers)
        else:
            _two_taps_checked(numbers)
        return True
    if num_taps == 4 and across == 1:
        if at_once == _FEWER:
            _four_taps_few(numbers)
        elif is_inside:
            _four_taps(numbers)
        else:
            _four_taps_checked(numbers)
        return True
    return False


@cached_njit(parallel=True, error_model="numpy")
def sum_over_taps(
    source: int, source_size: Any, result: int, result_size: Any, axes: Any, num_images: int, weights: int,
    per_group: int, num_in: int, num_out: int, bias: int, zeros: int,
) -> None:  # fmt: skip
    """All lines of the result. Sizes are (height, width, channels); `num_in` and `num_out` are the channels of a group.

    `per_group` is 0 for wide groups. Weights: [bundle][row][column][channel of the group][16], or for wide groups
    [group][chunk of one or two vectors][row][column][channel][16 or 32].
    """
    height, width, source_channels = source_size
    result_height, result_width, result_channels = result_size
    row_axis, column_axis = axes
    phases = column_axis[0] if column_axis[4] else 1
    is_bundle = per_group > 0
    chunk_channels = 16 if is_bundle or num_out <= 16 else 32
    chunks = 1 if is_bundle else -(-num_out // chunk_channels)
    num_units = -(-result_channels // 16) if is_bundle else result_channels // num_out * chunks
    tap_bytes = 4 * chunk_channels * (per_group if is_bundle else num_in)
    row_bytes = column_axis[3] * tap_bytes
    unit_bytes = row_axis[3] * row_bytes
    pixel_bytes, result_bytes = 4 * source_channels, 4 * result_channels
    band = band_lines(width * pixel_bytes, result_height)
    num_bands = -(-result_height // band)
    for task in numba.prange(num_images * num_bands):
        image, first_line = task // num_bands, task % num_bands * band
        for unit in range(num_units):
            inner = unit % chunks * chunk_channels  # the chunk's first channel within the group
            channel = 16 * unit if is_bundle else unit // chunks * num_out + inner
            in_channel = 16 * unit if is_bundle else unit // chunks * num_in
            num_channels = min(chunk_channels, result_channels - channel if is_bundle else num_out - inner)
            in_bits, out_bits = tail_bits(source_channels, in_channel), (1 << num_channels) - 1
            own_bias = bias + 4 * channel if bias != 0 else 0
            for y in range(first_line, min(first_line + band, result_height)):
                first_row, row_step, first_row_tap, next_row_tap = _reach(row_axis, y)
                num_row_taps = max(0, -(-(row_axis[3] - first_row_tap) // next_row_tap))
                start, end = _inside(first_row, row_step, num_row_taps, height)
                row = source + (image * height + first_row + start * row_step) * width * pixel_bytes + 4 * in_channel
                row_weights = weights + unit * unit_bytes + (first_row_tap + start * next_row_tap) * row_bytes
                target_row = result + (image * result_height + y) * result_width * result_bytes + 4 * channel
                for phase in range(min(phases, result_width)):
                    column, column_step, tap, next_tap = _reach(column_axis, phase)
                    num_taps = max(0, -(-(column_axis[3] - tap) // next_tap))
                    across = 1 if column_axis[4] else column_axis[0]
                    num_pixels = -(-(result_width - phase) // phases)
                    at_once = _pixels_at_once(num_pixels) if per_group == 1 else _MOST
                    weight, far = row_weights + tap * tap_bytes, (num_taps - 1) * column_step
                    for pixel in range(0, num_pixels, at_once):
                        left = column + pixel * across
                        last = left + (at_once - 1) * across
                        is_whole = num_pixels - pixel >= at_once
                        is_inside = is_whole and min(left, left + far) >= 0 and max(last, last + far) < width
                        target = target_row + (phase + pixel * phases) * result_bytes
                        if per_group == 1 and (column_step == 1 or column_step == -1):
                            # Taps in the order of the image, also where they run the other way.
                            back = num_taps - 1 if column_step == -1 else 0
                            beside = (
                                row + (left - back) * pixel_bytes, pixel_bytes, row_step * width * pixel_bytes,
                                end - start, weight + back * next_tap * tap_bytes, column_step * next_tap * tap_bytes,
                                next_row_tap * row_bytes, left - back, width, zeros, own_bias, target,
                                phases * result_bytes, num_pixels - pixel, out_bits,
                            )  # fmt: skip
                            if _add_depthwise(beside, num_taps, across, at_once, is_inside):
                                continue
                        numbers = (
                            row + left * pixel_bytes, across * pixel_bytes, column_step * pixel_bytes,
                            row_step * width * pixel_bytes, end - start, num_taps, weight, next_tap * tap_bytes,
                            next_row_tap * row_bytes, left, across, column_step, width, zeros, own_bias, target,
                            phases * result_bytes, num_pixels - pixel, in_bits, out_bits, num_in,
                        )  # fmt: skip
                        if per_group == 1:
                            _any_taps(numbers)
                        elif per_group == 2:
                            _pairs(numbers)
                        elif per_group == 4:
                            _fours(numbers)
                        elif per_group == 8:
                            _eights(numbers)
                        elif chunk_channels == 16:
                            _wide(numbers)
                        else:
                            _wide_two(numbers)
