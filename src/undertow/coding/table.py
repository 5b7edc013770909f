"""The table of the literature for a file: what each tensor keeps, and how many bits that takes, as plain data.

In: an open file. Out: a row per tensor. P is pruning, Q sharing weights, H coding. Before coding a kept weight has a
code of a fixed number of bits, and its place is the gap to the weight before, of a fixed number of bits as well, with
a filler entry where a gap is too long; the bits are those with which gaps and codes together are smallest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy

from undertow.coding.entries import Entry, Kind
from undertow.coding.small_file import SmallFile
from undertow.coding.streams import GAP_BITS, gaps_of
from undertow.coding.tensors import CodedTensor


@dataclass(frozen=True)
class Row:
    """One tensor. What a dense tensor or an alias does not have is None."""

    name: str
    kind: str
    alias_of: str | None
    dtype: str
    shape: tuple[int, ...]
    num_weights: int
    num_kept: int
    tensor_bytes: int  # in memory, in its own dtype
    file_bytes: int
    share_of_file: float
    num_codes: int | None = None
    code_bits: int | None = None  # P+Q, per entry
    coded_code_bits: float | None = None  # P+Q+H, per kept weight
    gap_bits: int | None = None  # P+Q, per entry
    coded_gap_bits: float | None = None  # P+Q+H, per kept weight
    shared_bytes: int | None = None  # P+Q: entries of gap and code, codebook, scales


def make_table(file: SmallFile) -> list[Row]:
    """A row per tensor, in the file's order. Each coded tensor is decoded for it."""
    return [_row(file, entry) for entry in file.entries.values()]


def _row(file: SmallFile, entry: Entry) -> Row:
    tensor = file.read(entry.name) if entry.kind in (Kind.MIXED, Kind.HUFFMAN) else None
    row = Row(
        entry.name,
        entry.kind.name.lower(),
        entry.alias_of,
        str(entry.dtype).removeprefix("torch."),
        entry.shape,
        entry.num_weights,
        entry.num_kept if tensor is not None else entry.num_weights,
        entry.num_bytes,
        entry.payload_bytes,
        entry.payload_bytes / file.num_bytes,
    )
    if not isinstance(tensor, CodedTensor) or not entry.num_kept:
        return row
    size = shared_size(tensor)
    return replace(
        row,
        num_codes=entry.num_codes,
        code_bits=size.code_bits,
        coded_code_bits=8 * entry.sizes[1] / entry.num_kept,
        gap_bits=size.gap_bits,
        coded_gap_bits=8 * entry.sizes[0] / entry.num_kept,
        shared_bytes=size.num_bytes,
    )


@dataclass(frozen=True)
class SharedSize:
    """A tensor before coding: entries of a gap and a code, and the tables."""

    code_bits: int
    gap_bits: int
    num_bytes: int


def shared_size(tensor: CodedTensor) -> SharedSize:
    """What P+Q takes. Codes that no weight has are not counted."""
    num_codes = len(tensor.codes.unique())
    # One code more than values for the filler, where there are gaps.
    is_sparse = tensor.mask is not None and tensor.num_kept > 0
    code_bits = (num_codes + is_sparse - 1).bit_length() if num_codes else 0
    gap_bits, num_entries = 0, tensor.num_kept
    if is_sparse:
        assert tensor.mask is not None
        positions = numpy.flatnonzero(tensor.mask.numpy())
        sizes = {bits: gaps_of(positions, bits)[0].size for bits in GAP_BITS}
        gap_bits = min(sizes, key=lambda bits: sizes[bits] * (bits + code_bits))
        num_entries = sizes[gap_bits]
    num_tabled = num_codes + (0 if tensor.scales is None else len(tensor.scales))
    return SharedSize(
        code_bits, gap_bits, (num_entries * (gap_bits + code_bits) + 7) // 8 + num_tabled * tensor.dtype.itemsize
    )
