"""Bytes and numbers, coded by adaptive models: text of headers, planes of values, steps of codebooks.

Bytes are coded bit by bit, the highest first, by four mixed counters as in `mask_coder`. A plane is one byte of each
element: sign and exponent of a float are in the upper planes. A byte's surroundings are, in a plane, the byte before
and the next higher byte of the same element; in text, the three bytes before.

A number is coded by its length in bits, then the three bits below the highest, each by counters; the bits below those
are taken to be random.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.coding.counters import direct, moved, stretched
from undertow.coding.probabilities import COUNT_BITS, COUNTER_BITS, SQUASH, STRETCH_LIMIT
from undertow.coding.range_coder import FULL_SPAN, U64, decode_bit, encode_bit, finish, first_code
from undertow.kernels.compiler import cached_njit

_START = (1 << (COUNTER_BITS - 1)) << COUNT_BITS | 2
_HASH_BITS = 16
_MULTIPLIER = 0x9E3779B1
_EVEN = 1 << 15


@cached_njit(forceinline=True)
def _slot(context: int, node: int) -> int:
    return (((context << 8 | node) * _MULTIPLIER) & 0xFFFFFFFF) >> (32 - _HASH_BITS)


@cached_njit(error_model="numpy")
def run_bytes(symbols: Any, beside: Any, words: Any, is_decoding: bool) -> int:
    """Encode `symbols` into `words`, or decode them. `beside` is the plane above, or empty for text and the first."""
    tree = numpy.full(256, _START, numpy.uint32)
    first = numpy.full(1 << _HASH_BITS, _START, numpy.uint32)
    second = numpy.full(1 << _HASH_BITS, _START, numpy.uint32)
    third = numpy.full(1 << _HASH_BITS, _START, numpy.uint32)
    w0 = w1 = w2 = w3 = 22_000
    base, last_word = words.ctypes.data, words.size - 1
    low, span, at = U64(0), FULL_SPAN, 0
    if is_decoding:
        low = first_code(base)
        at = 2
    before = two_before = three_before = 0
    for index in range(symbols.size):
        if beside.size:
            second_context = int(beside[index])
            third_context = before << 8 | second_context
        else:
            second_context = before << 8 | two_before
            third_context = second_context << 8 | three_before
        symbol = 0 if is_decoding else int(symbols[index])
        node = 1
        for level in range(8):
            i1, i2, i3 = _slot(before, node), _slot(second_context, node), _slot(third_context, node)
            x0, x1 = stretched(tree[node]), stretched(first[i1])
            x2, x3 = stretched(second[i2]), stretched(third[i3])
            mixed = (w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3) >> 16
            mixed = min(max(mixed, -STRETCH_LIMIT), STRETCH_LIMIT)
            upper = SQUASH[mixed + STRETCH_LIMIT + 1]
            bit = (symbol >> (7 - level)) & 1
            if is_decoding:
                bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
            else:
                at, low, span = encode_bit(base, at, low, span, upper, bit)
            error = ((bit << 16) - upper) * 6
            w0 += (x0 * error + 131072) >> 18
            w1 += (x1 * error + 131072) >> 18
            w2 += (x2 * error + 131072) >> 18
            w3 += (x3 * error + 131072) >> 18
            tree[node] = moved(tree[node], bit)
            first[i1], second[i2], third[i3] = moved(first[i1], bit), moved(second[i2], bit), moved(third[i3], bit)
            node = node << 1 | bit
        symbols[index] = node & 255
        before, two_before, three_before = node & 255, before, two_before
    if is_decoding:
        return at
    return finish(base, at, low, span)


@cached_njit(error_model="numpy")
def run_numbers(numbers: Any, words: Any, is_decoding: bool) -> int:
    """Encode `numbers`, each from 0 to 2^63 - 2, into `words`, or decode them."""
    lengths = numpy.full(64, _START, numpy.uint32)
    heads = numpy.full(64 * 8, _START, numpy.uint32)
    base, last_word = words.ctypes.data, words.size - 1
    low, span, at = U64(0), FULL_SPAN, 0
    if is_decoding:
        low = first_code(base)
        at = 2
    for index in range(numbers.size):
        number = 1 if is_decoding else int(numbers[index]) + 1
        length = 0
        while (number >> length) > 1:
            length += 1
        node = 1
        for level in range(6):
            upper = direct(lengths[node])
            bit = (length >> (5 - level)) & 1
            if is_decoding:
                bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
            else:
                at, low, span = encode_bit(base, at, low, span, upper, bit)
            lengths[node] = moved(lengths[node], bit)
            node = node << 1 | bit
        length = min(node & 63, 62)
        value = 1
        for level in range(length):
            slot = length * 8 + (value & 7)
            upper = direct(heads[slot]) if level < 3 else _EVEN
            bit = (number >> (length - 1 - level)) & 1
            if is_decoding:
                bit, at, low, span = decode_bit(base, last_word, at, low, span, upper)
            else:
                at, low, span = encode_bit(base, at, low, span, upper, bit)
            if level < 3:
                heads[slot] = moved(heads[slot], bit)
            value = value << 1 | bit
        numbers[index] = value - 1
    if is_decoding:
        return at
    return finish(base, at, low, span)
