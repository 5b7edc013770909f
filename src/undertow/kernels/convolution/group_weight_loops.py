"""The loops of the weights' cotangent of grouped convolutions: over lines, groups and taps.

In and out: addresses and sizes (integers). For each tap t, output o and channel c of its group,

    ct_w[t, c, o] = sum over pixels q of x[q stride - padding + t dilation, c] ct[q, o]

Each thread has sums of its own, in the form in which `group_loops` reads weights. The sums of one vector of outputs are
in registers while some lines are gone through.
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.group_loops import band_lines
from undertow.kernels.convolution.group_tiles import make_weight_kernel, make_wide_weight_kernel

_WIDE_INPUTS = 8

_three_taps = make_weight_kernel(3, 1, False)
_three_taps_checked = make_weight_kernel(3, 1, True)
_five_taps = make_weight_kernel(5, 1, False)
_five_taps_checked = make_weight_kernel(5, 1, True)
_seven_taps = make_weight_kernel(7, 1, False)
_seven_taps_checked = make_weight_kernel(7, 1, True)
_one_tap = make_weight_kernel(1, 1, False)
_pairs = make_weight_kernel(1, 2, False)
_fours = make_weight_kernel(1, 4, False)
_eights = make_weight_kernel(1, 8, False)
_wide = make_wide_weight_kernel(_WIDE_INPUTS, 1)
_wide_two = make_wide_weight_kernel(_WIDE_INPUTS, 2)
_wide_one = make_wide_weight_kernel(1, 1)
_wide_one_two = make_wide_weight_kernel(1, 2)


@numba.njit(error_model="numpy")
def _positions(axis: Any, tap: int, num_taps: int, size: int, ct_size: int) -> Any:
    """Pixels of ct, from and up to, for which some of the taps are inside, and those for which all are."""
    stride, padding, dilation = axis[0], axis[1], axis[2]
    first, last = tap * dilation - padding, (tap + num_taps - 1) * dilation - padding
    begin = min(max(0, -(last // stride)), ct_size)
    end = max(begin, min(ct_size, (size - 1 - first) // stride + 1))
    all_begin = min(max(begin, -(first // stride)), end)
    all_end = max(all_begin, min(end, (size - 1 - last) // stride + 1))
    return begin, end, all_begin, all_end


@numba.njit(error_model="numpy")
def _add_depthwise(numbers: Any, num_taps: int, is_inside: bool) -> None:
    """Run the kernel for so many taps."""
    if num_taps == 3:
        if is_inside:
            _three_taps(numbers)
        else:
            _three_taps_checked(numbers)
    elif num_taps == 5:
        if is_inside:
            _five_taps(numbers)
        else:
            _five_taps_checked(numbers)
    elif num_taps == 7:
        if is_inside:
            _seven_taps(numbers)
        else:
            _seven_taps_checked(numbers)
    else:
        _one_tap(numbers)


@numba.njit(error_model="numpy")
def _add_wide(numbers: Any, num_in: int, chunk_channels: int) -> None:
    """Run the kernels for all inputs of a wide group, some at a time."""
    ct, ct_step, ct_line_step, x, pixel_step, line_step, num_pixels, num_lines, sums, bits = numbers
    channel = 0
    while channel < num_in:
        at_once = _WIDE_INPUTS if num_in - channel >= _WIDE_INPUTS else 1
        own = (
            ct, ct_step, ct_line_step, x + 4 * channel, pixel_step, line_step, num_pixels, num_lines,
            sums + 4 * channel * chunk_channels, bits,
        )  # fmt: skip
        if chunk_channels == 16:
            if at_once == 1:
                _wide_one(own)
            else:
                _wide(own)
        elif at_once == 1:
            _wide_one_two(own)
        else:
            _wide_two(own)
        channel += at_once


@cached_njit(parallel=True, error_model="numpy")
def sum_over_pixels(
    ct: int, ct_size: Any, source: int, source_size: Any, axes: Any, num_lines: int, per_group: int, num_in: int,
    num_out: int, num_parts: int, sums: int, part_bytes: int, zeros: int,
) -> None:  # fmt: skip
    """Add to the sums of each part what its share of the lines gives. Sizes are (height, width, channels)."""
    height, width, source_channels = source_size
    ct_height, ct_width, ct_channels = ct_size
    row_axis, column_axis = axes
    is_bundle = per_group > 0
    chunk_channels = 16 if is_bundle or num_out <= 16 else 32
    chunks = 1 if is_bundle else -(-num_out // chunk_channels)
    num_units = -(-ct_channels // 16) if is_bundle else ct_channels // num_out * chunks
    num_columns = column_axis[3]
    tap_bytes = 4 * chunk_channels * (per_group if is_bundle else num_in)
    row_bytes = num_columns * tap_bytes
    unit_bytes = row_axis[3] * row_bytes
    pixel_bytes, ct_bytes = 4 * source_channels, 4 * ct_channels
    at_once = num_columns if per_group == 1 and (num_columns == 3 or num_columns == 5 or num_columns == 7) else 1
    band = band_lines(width * pixel_bytes, ct_height)
    for part in numba.prange(num_parts):
        line, last_line = part * num_lines // num_parts, (part + 1) * num_lines // num_parts
        while line < last_line:
            image, first_y = line // ct_height, line % ct_height
            end_y = min(ct_height, first_y + band, first_y + last_line - line)
            line += end_y - first_y
            for unit in range(num_units):
                inner = unit % chunks * chunk_channels  # the chunk's first channel within the group
                channel = 16 * unit if is_bundle else unit // chunks * num_out + inner
                in_channel = 16 * unit if is_bundle else unit // chunks * num_in
                num_channels = min(chunk_channels, ct_channels - channel if is_bundle else num_out - inner)
                bits = (1 << num_channels) - 1
                for row_tap in range(row_axis[3]):
                    top, bottom, _, _ = _positions(row_axis, row_tap, 1, height, ct_height)
                    top, bottom = max(top, first_y), min(bottom, end_y)
                    row = top * row_axis[0] - row_axis[1] + row_tap * row_axis[2]
                    row_start = source + (image * height + row) * width * pixel_bytes + 4 * in_channel
                    ct_start = ct + (image * ct_height + top) * ct_width * ct_bytes + 4 * channel
                    own_sums = sums + part * part_bytes + unit * unit_bytes + row_tap * row_bytes
                    for tap in range(0, num_columns, at_once):
                        begin, end, all_begin, all_end = _positions(column_axis, tap, at_once, width, ct_width)
                        for piece in range(3):
                            low = begin if piece == 0 else all_begin if piece == 1 else all_end
                            high = all_begin if piece == 0 else all_end if piece == 1 else end
                            if low >= high or top >= bottom:
                                continue
                            column = low * column_axis[0] - column_axis[1] + tap * column_axis[2]
                            here, at = ct_start + low * ct_bytes, row_start + column * pixel_bytes
                            target, pixel_step = own_sums + tap * tap_bytes, column_axis[0] * pixel_bytes
                            ct_line_step = ct_width * ct_bytes
                            line_step = row_axis[0] * width * pixel_bytes
                            if per_group == 0:
                                numbers = (
                                    here, ct_bytes, ct_line_step, at, pixel_step, line_step, high - low, bottom - top,
                                    target, bits,
                                )  # fmt: skip
                                _add_wide(numbers, num_in, chunk_channels)
                                continue
                            of_bundle = (
                                here, ct_bytes, ct_line_step, at, pixel_step, line_step, column_axis[2] * pixel_bytes,
                                column, column_axis[0], column_axis[2], width, zeros, high - low, bottom - top, target,
                                tap_bytes, bits,
                            )  # fmt: skip
                            if per_group == 1:
                                _add_depthwise(of_bundle, at_once, piece == 1)
                            elif per_group == 2:
                                _pairs(of_bundle)
                            elif per_group == 4:
                                _fours(of_bundle)
                            else:
                                _eights(of_bundle)
