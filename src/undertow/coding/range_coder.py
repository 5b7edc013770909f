"""A binary range coder: decisions with their probabilities in, words of 32 bits out, and back.

The state is an interval of 64 bits. A decision divides it in proportion to its probability (16 bits); as soon as it is
narrower than 2^32, a word leaves or enters. So a decision costs at most 2^-16 bits more than its information, and a
multiplication. After the last bytes of a stream the decoder reads zeros, so zeros at a stream's end are not stored.

The functions are inlined into the loops of the models. All numbers are unsigned, of 64 bits: Numba makes a float of a
sum of signed and unsigned. Words are named by their address: to pass an array, references to it are counted by atomic
additions, and those took a sixth to a third of the time. Indices are unsigned in the models' loops, since Numba lets a
signed one count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.kernels.compiler import HAS_NUMBA, cached_njit

if HAS_NUMBA:
    from undertow.kernels.vectors import load_word, store_word

inline: Any = cached_njit(forceinline=True)

U64: Any = numpy.uint64
I64: Any = numpy.int64
FULL_SPAN = U64(0xFFFFFFFFFFFFFFFF)
_ONE, _HALF, _WORD = U64(1), U64(16), U64(32)
_NARROW = U64(1 << 32)
_LOW_WORD = U64(0xFFFFFFFF)


def to_words(stream: bytes) -> Any:
    """A stream as words, the first byte the highest; the last word is zero and stands for all after it."""
    return numpy.frombuffer(stream + bytes(-len(stream) % 4 + 12), ">u4").astype(numpy.uint32)


def room_for(num_decisions: int) -> Any:
    """Words for so many decisions: none costs more than log2(65536 / 32) = 11 bits. Unused pages stay untouched."""
    return numpy.empty(num_decisions * 11 // 32 + 8, numpy.uint32)


@inline
def first_code(words: int) -> Any:
    """The state's first two words."""
    return load_word(words) << _WORD | load_word(words + 4)


@inline
def decode_bit(words: int, last: int, at: int, code: Any, span: Any, upper: int) -> Any:
    """The next decision, and the state after it: (bit, at, code, span). `upper` is 65536 p(1), `last` the last word."""
    bound = (span >> _HALF) * U64(upper)
    # No branch: it would be mispredicted as often as the decision is a surprise.
    bit = int(code < bound)
    zeros = U64(bit) - _ONE
    code = code - (bound & zeros)
    span = (bound & ~zeros) | ((span - bound) & zeros)
    if span < _NARROW:
        span = span << _WORD
        code = code << _WORD | load_word(words + 4 * min(at, last))
        at += 1
    return bit, at, code, span


@cached_njit()
def _carry(words: int, at: int) -> None:
    """Add 1 to the number that the words before `at` are."""
    at -= 1
    while load_word(words + 4 * at) == _LOW_WORD:
        store_word(words + 4 * at, U64(0))
        at -= 1
    store_word(words + 4 * at, load_word(words + 4 * at) + _ONE)


@inline
def encode_bit(words: int, at: int, low: Any, span: Any, upper: int, bit: int) -> Any:
    """The state after a decision was written: (at, low, span)."""
    bound = (span >> _HALF) * U64(upper)
    zeros = U64(bit) - _ONE
    span = (bound & ~zeros) | ((span - bound) & zeros)
    low = low + (bound & zeros)
    if low < (bound & zeros):
        _carry(words, at)
    if span < _NARROW:
        span = span << _WORD
        store_word(words + 4 * at, low >> _WORD)
        low = low << _WORD
        at += 1
    return at, low, span


@cached_njit()
def finish(words: int, at: int, low: Any, span: Any) -> int:
    """Write the number inside the last interval that ends with the most zero bytes; returns the number of words."""
    number = low
    has_carry = False
    for kept in range(9):
        unit = ~U64(0) if kept == 0 else (_ONE << U64(64 - 8 * kept)) - _ONE
        number = (low + unit) & ~unit
        has_carry = number < low
        if number - low < span:
            break
    if has_carry:
        _carry(words, at)
    store_word(words + 4 * at, number >> _WORD)
    store_word(words + 4 * at + 4, number)
    return at + 2


def to_stream(words: Any, num_words: int) -> bytes:
    """The stream that so many words are."""
    return bytes(words[:num_words].astype(">u4").tobytes().rstrip(b"\0"))
