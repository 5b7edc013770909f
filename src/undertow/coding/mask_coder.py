"""Which weights are kept, coded by a mix of four adaptive models.

In: a mask of rows, channels, and kernels of height x width. Out: a stream of bytes; and back. A decision per weight,
row by row, channel by channel. Magnitude pruning leaves rows, columns and channels of very different density, and
clusters inside kernels, so four counters predict each decision, and their weighted sum in the stretched domain codes it
(see `probabilities`):

- the row so far;
- the column so far: the same channel and kernel position in the rows before;
- the same kernel position in the three channels and the three rows before;
- six earlier neighbours inside the kernel (left, above, above left, above right, two to the left, two above), and the
  position, where there are at most 64.

All counters start at the tensor's density, which the header gives. Magnitudes of neighbours and densities as contexts
were tried: they win less than 0.1 % beside these four.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.coding.counters import moved, stretched
from undertow.coding.probabilities import SQUASH, STRETCH_LIMIT
from undertow.coding.range_coder import FULL_SPAN, I64, U64, decode_bit, encode_bit, finish, first_code
from undertow.kernels.compiler import cached_njit

START_COUNT = 4
MAX_POSITIONS = 64


@cached_njit(error_model="numpy")
def run_mask(
    mask: Any, words: Any, rows: int, channels: int, height: int, width: int, start: int, is_decoding: bool
) -> int:
    """Encode `mask` into `words`, or decode it; all counters begin as `start`. Returns the number of words."""
    size = height * width
    row_size = channels * size
    columns = numpy.full(row_size, start, numpy.uint32)
    around = numpy.full(64, start, numpy.uint32)
    num_positions = size if size <= MAX_POSITIONS else 1
    inside = numpy.full(64 * num_positions, start, numpy.uint32)
    # The last three decisions of each column, and of each kernel position in this row; the latest is bit 0.
    column_bits = numpy.zeros(row_size, numpy.uint8)
    channel_bits = numpy.zeros(size, numpy.uint8)
    w0 = w1 = w2 = w3 = 20_000
    base, last_word = words.ctypes.data, words.size - 1
    low, span, at = U64(0), FULL_SPAN, 0
    if is_decoding:
        low = first_code(base)
        at = 2
    index = 0
    for _row in range(rows):
        row = start
        column = 0
        channel_bits[:] = 0
        for _channel in range(channels):
            for y in range(height):
                left = 0
                for x in range(width):
                    position = y * width + x
                    above, before = I64(column_bits[U64(column)]), I64(channel_bits[U64(position)])
                    a = above << 3 | before
                    b = 0
                    if size > 1:
                        b = left
                        if y > 0:
                            b |= I64(mask[U64(index - width)]) << 2
                            if x > 0:
                                b |= I64(mask[U64(index - width - 1)]) << 3
                            if x + 1 < width:
                                b |= I64(mask[U64(index - width + 1)]) << 4
                            if y > 1:
                                b |= I64(mask[U64(index - 2 * width)]) << 5
                        if num_positions > 1:
                            b = b * num_positions + position

                    x0 = stretched(row)
                    x1 = stretched(columns[U64(column)])
                    x2 = stretched(around[U64(a)])
                    x3 = stretched(inside[U64(b)])
                    mixed = (w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3) >> 16
                    mixed = min(max(mixed, -STRETCH_LIMIT), STRETCH_LIMIT)
                    upper = SQUASH[U64(mixed + STRETCH_LIMIT + 1)]
                    if is_decoding:
                        bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
                        mask[U64(index)] = bit
                    else:
                        bit = I64(mask[U64(index)])
                        at, low, span = encode_bit(base, at, low, span, upper, bit)
                    error = ((bit << 16) - upper) * 6
                    w0 += (x0 * error + 131072) >> 18
                    w1 += (x1 * error + 131072) >> 18
                    w2 += (x2 * error + 131072) >> 18
                    w3 += (x3 * error + 131072) >> 18
                    row = moved(row, bit)
                    columns[U64(column)] = moved(columns[U64(column)], bit)
                    around[U64(a)] = moved(around[U64(a)], bit)
                    inside[U64(b)] = moved(inside[U64(b)], bit)
                    column_bits[U64(column)] = (above << 1 | bit) & 7
                    channel_bits[U64(position)] = (before << 1 | bit) & 7
                    left = (left << 1 | bit) & 3
                    index += 1
                    column += 1
    if is_decoding:
        return at
    return finish(base, at, low, span)
