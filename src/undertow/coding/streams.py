"""The streams that a tensor's payload consists of: arrays in, bytes out, and back, for both coders.

`mixed`, the default, codes a mask and ranks by adaptive models; `huffman` codes gaps and ranks as published. Whatever
comes from a file is checked before memory is taken for it, and its stream has to end where its decoder does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from undertow.coding.byte_coder import run_bytes, run_numbers
from undertow.coding.code_coder import run_codes
from undertow.coding.huffman import decode_symbols, encode_symbols
from undertow.coding.mask_coder import START_COUNT, run_mask
from undertow.coding.probabilities import COUNT_BITS, COUNTER_BITS, MAX_DECISIONS_PER_BYTE
from undertow.coding.range_coder import room_for, to_stream, to_words
from undertow.errors import DataError

# A code's state is 8 bytes, so this many more may have been spent without being stored.
_SPARE_BYTES = 16
GAP_BITS = range(2, 9)
View = tuple[int, int, int, int]


def make_view(shape: tuple[int, ...], kernel: tuple[int, int]) -> View:
    """Rows, channels, height and width of a tensor whose rows are seen as kernels of this size."""
    rows = shape[0] if len(shape) > 1 else 1
    size = kernel[0] * kernel[1]
    return rows, (math.prod(shape) // rows if rows else 0) // size, *kernel


def possible_kernels(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The kernels to try: the tensor's own; a matrix may be one whose columns were pixels of squares."""
    if len(shape) > 2:
        return [(math.prod(shape[2:-1]), shape[-1])]
    squares = [(s, s) for s in range(2, 33) if len(shape) == 2 and shape[1] and shape[1] % (s * s) == 0]
    return [(1, 1), *squares]


def can_hold(num_bytes: int, num_decisions: int) -> bool:
    """Whether a stream of so many bytes may hold so many decisions."""
    return num_decisions <= (num_bytes + _SPARE_BYTES) * MAX_DECISIONS_PER_BYTE


def _check_size(stream: bytes, num_decisions: int, what: str) -> Any:
    if not can_hold(len(stream), num_decisions):
        raise DataError(f"{what}: {len(stream)} coded bytes cannot hold {num_decisions} decisions")
    if stream and stream[-1] == 0:
        raise DataError(f"{what}: the coded stream ends with a zero, which the coder leaves out")
    return to_words(stream)


def _check_end(stream: bytes, num_words: int, what: str) -> None:
    if len(stream) > 4 * num_words:
        raise DataError(f"{what}: {len(stream) - 4 * num_words} bytes follow the end of the coded stream")


def _start(num_kept: int, num_weights: int) -> int:
    probability = min(max((num_kept << COUNTER_BITS) // num_weights, 256), (1 << COUNTER_BITS) - 256)
    return probability << COUNT_BITS | START_COUNT


def encode_mask(mask: Any, view: View) -> bytes:
    """The mask as int8, in the order of the weights."""
    words = room_for(mask.size)
    size = run_mask(mask, words, *view, _start(int(numpy.count_nonzero(mask)), mask.size), False)
    return to_stream(words, size)


def decode_mask(stream: bytes, num_kept: int, view: View, what: str) -> Any:
    """The mask as int8; it keeps `num_kept` weights."""
    num_weights = math.prod(view)
    words = _check_size(stream, num_weights, what)
    mask = numpy.empty(num_weights, numpy.int8)
    _check_end(stream, run_mask(mask, words, *view, _start(num_kept, num_weights), True), what)
    if numpy.count_nonzero(mask) != num_kept:
        raise DataError(f"{what}: {numpy.count_nonzero(mask)} weights are kept where {num_kept} were said to be")
    return mask


def num_bits(num_codes: int) -> int:
    """The most decisions that a rank takes."""
    return max(num_codes - 1, 0).bit_length()


def encode_codes(mask: Any, ranks: Any, num_codes: int, zero_rank: int, view: View) -> bytes:
    """The ranks as int32, each below `num_codes`; `zero_rank` is the first that is not negative."""
    words = room_for(ranks.size * num_bits(num_codes))
    labels = numpy.zeros(mask.size, numpy.uint8)
    size = run_codes(mask, ranks, words, labels, *view, num_codes, zero_rank, False)
    return to_stream(words, size)


def decode_codes(stream: bytes, mask: Any, num_kept: int, num_codes: int, zero_rank: int, view: View, what: str) -> Any:
    """The ranks as int32."""
    words = _check_size(stream, num_kept * num_bits(num_codes), what)
    ranks = numpy.empty(num_kept, numpy.int32)
    labels = numpy.zeros(mask.size, numpy.uint8)
    _check_end(stream, run_codes(mask, ranks, words, labels, *view, num_codes, zero_rank, True), what)
    return ranks


def encode_text(text: bytes) -> bytes:
    """Bytes of names and metadata."""
    return _encode_bytes(numpy.frombuffer(bytearray(text), numpy.uint8), numpy.zeros(0, numpy.uint8))


def decode_text(stream: bytes, size: int, what: str) -> bytes:
    """`size` bytes of text."""
    return bytes(_decode_bytes(stream, size, numpy.zeros(0, numpy.uint8), what).tobytes())


def _encode_bytes(symbols: Any, beside: Any) -> bytes:
    words = room_for(8 * symbols.size)
    size = run_bytes(symbols, beside, words, False)
    return to_stream(words, size)


def _decode_bytes(stream: bytes, size: int, beside: Any, what: str) -> Any:
    words = _check_size(stream, 8 * size, what)
    symbols = numpy.empty(size, numpy.uint8)
    _check_end(stream, run_bytes(symbols, beside, words, True), what)
    return symbols


def encode_numbers(numbers: Any) -> bytes:
    """Numbers from 0 to 2^63 - 2."""
    words = room_for(numbers.size * 69)
    size = run_numbers(numbers.astype(numpy.int64), words, False)
    return to_stream(words, size)


def decode_numbers(stream: bytes, num: int, what: str) -> Any:
    """`num` numbers as int64."""
    words = _check_size(stream, 6 * num, what)
    numbers = numpy.empty(num, numpy.int64)
    _check_end(stream, run_numbers(numbers, words, True), what)
    return numbers


def plane_bytes(size: int, num: int) -> int:
    """How many bytes the plane of `num` elements takes that is described by `size`."""
    return size - 1 if size else num


def encode_planes(elements: Any) -> tuple[list[int], list[bytes]]:
    """Elements as rows of bytes, the lowest first. Per plane, the highest first: its size, and its bytes.

    The size is 0 if the plane is raw, or the number of coded bytes plus 1.
    """
    sizes, streams = [], []
    beside = numpy.zeros(0, numpy.uint8)
    for plane in reversed(range(elements.shape[1])):
        symbols = numpy.ascontiguousarray(elements[:, plane])
        coded = _encode_bytes(symbols, beside)
        is_raw = len(coded) >= symbols.size
        sizes.append(0 if is_raw else len(coded) + 1)
        streams.append(symbols.tobytes() if is_raw else coded)
        beside = symbols
    return sizes, streams


def decode_planes(payload: bytes, sizes: list[int], num: int, what: str) -> Any:
    """The elements as rows of bytes; `payload` holds the planes one after the other, the highest first."""
    elements = numpy.empty((num, len(sizes)), numpy.uint8)
    beside = numpy.zeros(0, numpy.uint8)
    at = 0
    for plane, size in zip(reversed(range(len(sizes))), sizes, strict=True):
        stream = payload[at : at + plane_bytes(size, num)]
        at += len(stream)
        raw = numpy.frombuffer(bytearray(stream), numpy.uint8)
        beside = _decode_bytes(stream, num, beside, what) if size else raw
        elements[:, plane] = beside
    return elements


def gaps_of(positions: Any, bits: int) -> tuple[Any, Any]:
    """Gaps of so many bits with a filler where one is too long; and which entries are no fillers."""
    gaps = numpy.diff(positions, prepend=-1) - 1
    reach = 1 << bits
    fillers = gaps // reach
    ends = numpy.cumsum(fillers + 1) - 1
    short = numpy.full(int(ends[-1]) + 1, reach - 1, numpy.int32)
    short[ends] = gaps - fillers * reach
    return short, ends


def encode_gaps(positions: Any, ranks: Any, num_codes: int) -> tuple[int, int, bytes, bytes]:
    """Gaps and codes as published. Returns the bits of a gap with which the result is smallest, the number of entries,
    and the coded gaps and codes. Code 0 is the filler, a rank plus 1 a code.
    """
    results = []
    for bits in GAP_BITS:
        short, ends = gaps_of(positions, bits)
        codes = numpy.zeros(short.size, numpy.int32)
        codes[ends] = ranks + 1
        coded = encode_symbols(short, 1 << bits), encode_symbols(codes, num_codes + 1)
        results.append((len(coded[0]) + len(coded[1]), bits, short.size, *coded))
    _, bits, num_entries, first, second = min(results, key=lambda result: result[:2])
    return bits, num_entries, first, second


def decode_gaps(
    gap_stream: bytes, code_stream: bytes, bits: int, num_entries: int, num_codes: int, num_weights: int, what: str
) -> tuple[Any, Any]:
    """The positions of the kept weights, ascending and below `num_weights`, and their ranks."""
    gaps = decode_symbols(gap_stream, num_entries, 1 << bits, what)
    codes = decode_symbols(code_stream, num_entries, num_codes + 1, what)
    positions = numpy.cumsum(gaps.astype(numpy.int64) + 1) - 1
    if num_entries and positions[-1] >= num_weights:
        raise DataError(f"{what}: the gaps lead to position {positions[-1]} of {num_weights} weights")
    is_filler = codes == 0
    if (gaps[is_filler] != (1 << bits) - 1).any() or (num_entries and is_filler[-1]):
        raise DataError(f"{what}: a filler stands where no gap was too long")
    return positions[~is_filler], codes[~is_filler] - 1
