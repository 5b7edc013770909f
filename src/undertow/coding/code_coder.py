"""The codes of the kept weights: ranks in a sorted codebook, coded bit by bit, the highest first.

In: the mask, and for each kept weight in its order the rank of its value. Out: a stream of bytes; and back. The bits so
far choose a counter (a binary tree over the ranks), so a counter exists for each half of each range of values. The
first three bits, sign and rough magnitude, depend on the surroundings, so there four counters are mixed as in
`mask_coder`:

- the tree alone;
- with the classes of the weights left and above in the kernel (without kernels: of the last channel, of the last row);
- with the mean distance from zero, in ranks, of the row so far and of the column so far, each against that of all;
- with the classes of the same position in the last channel and the last row (without kernels: of the last two kept).

A class is a sixth of the ranks, or 0 where the weight was removed. Later bits have almost no context that helps: there
a counter alone codes. Where a range holds no rank of the codebook the bit is known and not coded, so no decoded rank
lies outside the codebook.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.coding.counters import direct, moved, stretched
from undertow.coding.probabilities import COUNT_BITS, COUNTER_BITS, RATE, SQUASH, STRETCH_LIMIT
from undertow.coding.range_coder import FULL_SPAN, I64, U64, decode_bit, encode_bit, finish, first_code
from undertow.kernels.compiler import cached_njit

NUM_MIXED_BITS = 3
NUM_CLASSES = 6
START = (1 << (COUNTER_BITS - 1)) << COUNT_BITS | 6
START_WEIGHT = 20_000
_NUM_NODES = 1 << NUM_MIXED_BITS
_NUM_LABELS = NUM_CLASSES + 1
# The bin of a mean over the mean of all, in sixteenths: about a fifth of the mean wide in the middle.
_BINS = numpy.searchsorted([7, 10, 13, 15, 17, 19, 22, 28], numpy.arange(32), side="right").astype(numpy.uint8)
_NUM_BINS = 9


@cached_njit(error_model="numpy")
def run_codes(
    mask: Any,
    ranks: Any,
    words: Any,
    labels: Any,
    rows: int,
    channels: int,
    height: int,
    width: int,
    num_codes: int,
    zero_rank: int,
    is_decoding: bool,
) -> int:
    """Encode `ranks` into `words`, or decode them; `labels` is zeros, one per weight. Returns the number of words."""
    size = height * width
    row_size = channels * size
    num_bits = 0
    while (1 << num_bits) < num_codes:
        num_bits += 1
    tree = numpy.full(1 << num_bits, START, numpy.uint32)
    near = numpy.full(_NUM_LABELS * _NUM_LABELS * _NUM_NODES, START, numpy.uint32)
    scales = numpy.full(_NUM_BINS * _NUM_BINS * _NUM_NODES, START, numpy.uint32)
    far = numpy.full(_NUM_LABELS * _NUM_LABELS * _NUM_NODES, START, numpy.uint32)
    classes = numpy.zeros(num_codes, numpy.uint8)
    for rank in range(num_codes):
        classes[rank] = 1 + rank * NUM_CLASSES // num_codes
    # Means have 8 bits below one rank; they move like counters, by RATE.
    column_means = numpy.zeros(row_size, numpy.int32)
    column_counts = numpy.zeros(row_size, numpy.int16)
    weights = numpy.full(4 * NUM_MIXED_BITS, START_WEIGHT, numpy.int64)
    all_mean, all_count = 64 * num_codes, 4
    base, last_word = words.ctypes.data, words.size - 1
    low, span, at = U64(0), FULL_SPAN, 0
    if is_decoding:
        low = first_code(base)
        at = 2
    index, number = 0, 0
    last, last_but_one = 0, 0
    inverse = (1 << 30) // (all_mean + 1)
    for r in range(rows):
        row_mean, row_count = all_mean, 4
        column = -1
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    column += 1
                    if not mask[U64(index)]:
                        index += 1
                        continue
                    previous = I64(labels[U64(index - size)]) if c > 0 else 0
                    above = I64(labels[U64(index - row_size)]) if r > 0 else 0
                    if size > 1:
                        a = I64(labels[U64(index - 1)]) if x > 0 else 0
                        b = I64(labels[U64(index - width)]) if y > 0 else 0
                        near_at = (a * _NUM_LABELS + b) * _NUM_NODES
                        far_at = (previous * _NUM_LABELS + above) * _NUM_NODES
                    else:
                        near_at = (previous * _NUM_LABELS + above) * _NUM_NODES
                        far_at = (last * _NUM_LABELS + last_but_one) * _NUM_NODES
                    column_mean = I64(column_means[U64(column)])
                    column_count = I64(column_counts[U64(column)])
                    if column_count == 0:
                        column_mean, column_count = all_mean, 4
                    row_bin = I64(_BINS[U64(min((row_mean * inverse) >> 26, 31))])
                    column_bin = I64(_BINS[U64(min((column_mean * inverse) >> 26, 31))])
                    scale_at = (row_bin * _NUM_BINS + column_bin) * _NUM_NODES
                    rank = 0 if is_decoding else I64(ranks[U64(number)])
                    node = 1
                    for level in range(num_bits):
                        remaining = num_bits - 1 - level
                        if (((node << 1 | 1) - (2 << level)) << remaining) >= num_codes:
                            node <<= 1
                            continue
                        bit = (rank >> remaining) & 1
                        if level >= NUM_MIXED_BITS:
                            upper = direct(tree[U64(node)])
                            if is_decoding:
                                bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
                            else:
                                at, low, span = encode_bit(base, at, low, span, upper, bit)
                        else:
                            first = U64(4 * level)
                            x0 = stretched(tree[U64(node)])
                            x1 = stretched(near[U64(near_at + node)])
                            x2 = stretched(scales[U64(scale_at + node)])
                            x3 = stretched(far[U64(far_at + node)])
                            mixed = (
                                weights[first] * x0
                                + weights[first + U64(1)] * x1
                                + weights[first + U64(2)] * x2
                                + weights[first + U64(3)] * x3
                            ) >> 16
                            mixed = min(max(mixed, -STRETCH_LIMIT), STRETCH_LIMIT)
                            upper = SQUASH[U64(mixed + STRETCH_LIMIT + 1)]
                            if is_decoding:
                                bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
                            else:
                                at, low, span = encode_bit(base, at, low, span, upper, bit)
                            error = ((bit << 16) - upper) * 2
                            weights[first] += (x0 * error + 131072) >> 18
                            weights[first + U64(1)] += (x1 * error + 131072) >> 18
                            weights[first + U64(2)] += (x2 * error + 131072) >> 18
                            weights[first + U64(3)] += (x3 * error + 131072) >> 18
                            near[U64(near_at + node)] = moved(near[U64(near_at + node)], bit)
                            scales[U64(scale_at + node)] = moved(scales[U64(scale_at + node)], bit)
                            far[U64(far_at + node)] = moved(far[U64(far_at + node)], bit)
                        tree[U64(node)] = moved(tree[U64(node)], bit)
                        node = node << 1 | bit
                    rank = node - (1 << num_bits)
                    if is_decoding:
                        ranks[U64(number)] = rank
                    label = I64(classes[U64(rank)])
                    labels[U64(index)] = label
                    last, last_but_one = label, last
                    distance = abs(2 * rank + 1 - 2 * zero_rank) << 7
                    row_mean += ((distance - row_mean) * RATE[U64(row_count)]) >> 16
                    row_count = min(row_count + 1, 1023)
                    column_mean += ((distance - column_mean) * RATE[U64(column_count)]) >> 16
                    column_means[U64(column)] = column_mean
                    column_counts[U64(column)] = min(column_count + 1, 1023)
                    all_mean += ((distance - all_mean) * RATE[U64(all_count)]) >> 16
                    all_count = min(all_count + 1, 1023)
                    if number & 15 == 0:
                        # A division is slow, and the mean of all moves slowly.
                        inverse = (1 << 30) // (all_mean + 1)
                    number += 1
                    index += 1
    if is_decoding:
        return at
    return finish(base, at, low, span)
