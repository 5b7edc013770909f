"""A binary range coder: decisions with their probabilities in, bytes out, and back.

The state is an interval of 64 bits. A decision divides it in proportion to its probability (16 bits); as soon as it is
narrower than 2^32, 32 bits leave or enter. So a decision costs at most 2^-16 bits more than its information, and a
multiplication. After the last bytes of a stream the decoder reads zeros, so zeros at a stream's end are not stored.

The functions are inlined into the loops of the models. All numbers are unsigned, of 64 bits: Numba makes a float of a
sum of signed and unsigned.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.errors import DataError
from undertow.kernels.compiler import cached_njit

inline: Any = cached_njit(inline="always")

U64 = numpy.uint64
FULL_SPAN = U64(0xFFFFFFFFFFFFFFFF)
_ONE, _BYTE, _HALF, _WORD = U64(1), U64(8), U64(16), U64(32)
_NARROW = U64(1 << 32)
_LOW_WORD = U64(0xFFFFFFFF)


@cached_njit(forceinline=True)
def read_word(data: Any, at: int) -> Any:
    """Four bytes from `at` on, the first the highest, and zeros beyond the end."""
    word = U64(0)
    for index in range(at, at + 4):
        word = word << _BYTE
        if index < data.size:
            word = word | U64(data[index])
    return word


@cached_njit(forceinline=True)
def decode_bit(data: Any, at: int, code: Any, span: Any, upper: int) -> Any:
    """The next decision, and the state after it: (bit, at, code, span). `upper` is 65536 p(1)."""
    bound = (span >> _HALF) * U64(upper)
    # No branch: it would be mispredicted as often as the decision is a surprise.
    bit = int(code < bound)
    zeros = U64(bit) - _ONE
    code = code - (bound & zeros)
    span = (bound & ~zeros) | ((span - bound) & zeros)
    if span < _NARROW:
        span = span << _WORD
        code = code << _WORD | read_word(data, at)
        at += 4
    return bit, at, code, span


@cached_njit(forceinline=True)
def encode_bit(data: Any, at: int, low: Any, span: Any, upper: int, bit: int) -> Any:
    """The state after a decision was written: (at, low, span). `data` must have room for 4 bytes more."""
    bound = (span >> _HALF) * U64(upper)
    if bit:
        span = bound
    else:
        span = span - bound
        low = low + bound
        if low < bound:
            # A carry: the bytes before are one number, which grows by one.
            index = at - 1
            while data[index] == 255:
                data[index] = 0
                index -= 1
            data[index] += 1
    if span < _NARROW:
        span = span << _WORD
        word = low >> _WORD
        for index in range(4):
            data[at + index] = (word >> U64(24 - 8 * index)) & U64(255)
        low = low << _WORD
        at += 4
    return at, low, span


@cached_njit()
def finish(data: Any, at: int, low: Any, span: Any) -> int:
    """Write the shortest number inside the last interval; returns the stream's length."""
    # With `kept` bytes, the least number that is not below `low` has to be inside.
    number = low
    has_carry = False
    for kept in range(9):
        unit = _LOW_WORD * _NARROW + _LOW_WORD if kept == 0 else (_ONE << U64(64 - 8 * kept)) - _ONE
        number = (low + unit) & ~unit
        has_carry = number < low
        if number - low < span:
            break
    if has_carry:
        index = at - 1
        while data[index] == 255:
            data[index] = 0
            index -= 1
        data[index] += 1
    for index in range(8):
        data[at + index] = (number >> U64(56 - 8 * index)) & U64(255)
    length = at + 8
    while length > 0 and data[length - 1] == 0:
        length -= 1
    return length


def check_end(stream: Any, at: int, what: str) -> None:
    """Refuse a stream that is longer or shorter than what was decoded from it."""
    if at > stream.size + 8 or at + 0 < stream.size or (stream.size and stream[-1] == 0):
        raise DataError(f"{what}: the coded stream ends elsewhere than its decoder")
