"""Huffman coding as Deep Compression publishes it (Han, Mao, Dally 2016): of codes, and of gaps between kept weights.

In: symbols below a count. Out: their code lengths, five bits each, then the codes, the highest bit first; and back. The
code is canonical: it follows from the lengths alone, symbols of one length in ascending order. No length is above 24:
where Huffman's is, all counts are halved until none is.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy

from undertow.errors import DataError
from undertow.kernels.compiler import cached_njit

MAX_LENGTH = 24


def code_lengths(counts: Any) -> Any:
    """The length of each symbol's code; 0 where it does not occur."""
    counts = numpy.asarray(counts, numpy.int64)
    lengths = numpy.zeros(counts.size, numpy.uint8)
    present = numpy.flatnonzero(counts)
    if present.size == 1:
        lengths[present] = 1
    while present.size > 1:
        heap: list[tuple[int, int, list[int]]] = [(int(counts[s]), int(s), [int(s)]) for s in present]
        heapq.heapify(heap)
        lengths[:] = 0
        while len(heap) > 1:
            first, _, few = heapq.heappop(heap)
            second, tie, more = heapq.heappop(heap)
            lengths[few + more] += 1
            heapq.heappush(heap, (first + second, tie, few + more))
        if lengths.max() <= MAX_LENGTH:
            break
        counts = (counts + 1) // 2
    return lengths


def _check_lengths(lengths: Any, what: str) -> None:
    used = lengths[lengths > 0].astype(numpy.int64)
    kraft = int((1 << (MAX_LENGTH - used)).sum()) if used.size and used.max() <= MAX_LENGTH else 0
    # One symbol alone has a code of one bit; otherwise the codes fill the tree exactly.
    if kraft != 1 << MAX_LENGTH and not (used.size == 1 and used[0] == 1):
        raise DataError(f"{what}: the Huffman code lengths are not those of a complete code")


def _canonical(lengths: Any) -> tuple[Any, Any, Any]:
    """Symbols in the order of their codes; per length its first code, and where its symbols begin."""
    order = numpy.lexsort((numpy.arange(lengths.size), lengths))
    order = order[lengths[order] > 0].astype(numpy.int32)
    counts = numpy.bincount(lengths[order], minlength=MAX_LENGTH + 2).astype(numpy.int64)
    counts[0] = 0
    firsts, starts = numpy.zeros(MAX_LENGTH + 2, numpy.int64), numpy.zeros(MAX_LENGTH + 2, numpy.int64)
    for length in range(1, MAX_LENGTH + 2):
        firsts[length] = (firsts[length - 1] + counts[length - 1]) << 1
        starts[length] = starts[length - 1] + counts[length - 1]
    return order, firsts, starts


@cached_njit(error_model="numpy")
def _write(symbols: Any, lengths: Any, codes: Any, data: Any) -> int:
    buffer, held, at = 0, 0, 0
    for index in range(symbols.size):
        symbol = symbols[index]
        length = int(lengths[symbol])
        buffer = buffer << length | int(codes[symbol])
        held += length
        while held >= 8:
            held -= 8
            data[at] = (buffer >> held) & 255
            at += 1
        buffer &= (1 << held) - 1
    if held:
        data[at] = (buffer << (8 - held)) & 255
        at += 1
    return at


@cached_njit(error_model="numpy")
def _read(data: Any, order: Any, firsts: Any, starts: Any, symbols: Any) -> int:
    """Returns the number of bits read, or -1 where a code is none of those given."""
    at = 0
    num_bits = 8 * data.size
    for index in range(symbols.size):
        code = 0
        length = 0
        while True:
            if at >= num_bits or length >= 24:
                return -1
            code = code << 1 | (int(data[at >> 3]) >> (7 - (at & 7)) & 1)
            at += 1
            length += 1
            offset = code - firsts[length]
            if 0 <= offset < starts[length + 1] - starts[length]:
                symbols[index] = order[starts[length] + offset]
                break
    return at


def encode_symbols(symbols: Any, num_symbols: int) -> bytes:
    """The table and the codes of `symbols`, each below `num_symbols`."""
    lengths = code_lengths(numpy.bincount(symbols, minlength=num_symbols))
    order, firsts, starts = _canonical(lengths)
    codes = numpy.zeros(num_symbols, numpy.int64)
    codes[order] = firsts[lengths[order]] + numpy.arange(order.size) - starts[lengths[order]]
    table = numpy.packbits((lengths[:, None] >> numpy.arange(4, -1, -1)) & 1)
    data = numpy.zeros(3 * symbols.size + 1, numpy.uint8)
    size = _write(symbols.astype(numpy.int32), lengths, codes, data)
    return bytes(table.tobytes() + data[:size].tobytes())


def decode_symbols(data: bytes, num: int, num_symbols: int, what: str) -> Any:
    """`num` symbols from their table and codes. All of `data` has to be used, and its last bits zero."""
    table_bytes = (5 * num_symbols + 7) // 8
    if len(data) < table_bytes or num > 8 * (len(data) - table_bytes):
        raise DataError(f"{what}: {len(data)} bytes cannot hold {num} Huffman codes of {num_symbols} symbols")
    raw = numpy.frombuffer(data, numpy.uint8)
    bits = numpy.unpackbits(raw[:table_bytes])
    lengths = (bits[: 5 * num_symbols].reshape(-1, 5) << numpy.arange(4, -1, -1)).sum(1).astype(numpy.uint8)
    if bits[5 * num_symbols :].any():
        raise DataError(f"{what}: the table of Huffman code lengths is not padded with zeros")
    if not num:
        if lengths.any() or len(data) > table_bytes:
            raise DataError(f"{what}: there are Huffman codes, and no symbols")
        return numpy.zeros(0, numpy.int32)
    _check_lengths(lengths, what)
    symbols = numpy.empty(num, numpy.int32)
    used = _read(raw[table_bytes:], *_canonical(lengths), symbols)
    rest = 8 * (len(data) - table_bytes) - used
    if used < 0 or rest >= 8 or raw[-1] & ((1 << rest) - 1):
        raise DataError(f"{what}: the Huffman codes end elsewhere than their stream")
    return symbols
