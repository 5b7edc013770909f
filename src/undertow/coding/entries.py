"""What a file's header says of one tensor, and its check before anything is allocated.

In: the numbers of the header. Out: an Entry, whose counts and sizes agree with each other. What only decoding can tell
is checked in `payloads`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from undertow.coding.streams import GAP_BITS, can_hold, num_bits, plane_bytes
from undertow.coding.tensors import FLOAT_DTYPES, MAX_CODES
from undertow.errors import DataError

# The numbers by which a file names a dtype; a new one goes to the end.
DTYPES = (
    *FLOAT_DTYPES,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
MAX_DIMS = 16
MAX_WEIGHTS = 1 << 40


class Kind(IntEnum):
    """How a tensor is stored."""

    DENSE = 0
    MIXED = 1
    HUFFMAN = 2
    ALIAS = 3


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. Of an alias only `name` and `alias_of` count; the rest is that of its target."""

    name: str
    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[int, ...]  # dense: planes; else mask or gaps, codes, codebook, and planes of the scales
    alias_of: str | None = None
    num_kept: int = 0
    num_codes: int = 0
    kernel: tuple[int, int] = (1, 1)  # how `mixed` sees a row
    gap_bits: int = 0  # of `huffman`, as the number of its entries
    num_entries: int = 0
    checksum: int = 0
    offset: int = 0

    @property
    def num_weights(self) -> int:
        """The elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor in memory."""
        return self.num_weights * self.dtype.itemsize

    @property
    def has_scales(self) -> bool:
        """Whether each row has a scale."""
        return self.kind in (Kind.MIXED, Kind.HUFFMAN) and len(self.sizes) > 3

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales in the file."""
        return sum(plane_bytes(size, self.shape[0]) for size in self.sizes[3:]) if self.has_scales else 0

    @property
    def payload_bytes(self) -> int:
        """The bytes of the tensor in the file, without those of the header."""
        if self.kind is Kind.ALIAS:
            return 0
        if self.kind is Kind.DENSE:
            return sum(plane_bytes(size, self.num_weights) for size in self.sizes)
        return sum(self.sizes[:3]) + self.scale_bytes


def to_numbers(entry: Entry, indices: dict[str, int]) -> list[int]:
    """The numbers of the header that stand for `entry`; `indices` are those of the entries before."""
    if entry.alias_of is not None:
        return [Kind.ALIAS, indices[entry.alias_of]]
    numbers = [entry.kind, DTYPES.index(entry.dtype), len(entry.shape), *entry.shape]
    if entry.kind is Kind.DENSE:
        return [*numbers, *entry.sizes]
    numbers += [entry.num_kept, entry.num_codes, int(entry.has_scales)]
    numbers += entry.kernel if entry.kind is Kind.MIXED else (entry.gap_bits, entry.num_entries)
    return [*numbers, *entry.sizes]


def from_numbers(numbers: Iterator[int], name: str, before: list[Entry], where: str) -> Entry:
    """The entry that the next numbers stand for; whatever cannot be is refused."""

    def require(holds: bool, found: str) -> None:
        if not holds:
            raise DataError(f"{where}: the header is damaged: {found}")

    def require_planes(planes: tuple[int, ...], num: int) -> None:
        require(all(size <= num for size in planes), "a coded plane is longer than a raw one")
        is_held = all(not size or can_hold(size - 1, 8 * num) for size in planes)
        require(is_held, f"planes of {num} bytes in {planes}")

    number = next(numbers)
    require(number in set(Kind), f"no kind of tensor has the number {number}")
    kind = Kind(number)
    if kind is Kind.ALIAS:
        index = next(numbers)
        require(index < len(before), f"an alias names tensor {index}, which does not come before it")
        target = before[index]
        require(target.kind is not Kind.ALIAS, "an alias names another alias")
        return Entry(name, kind, target.dtype, target.shape, (), target.name)
    number = next(numbers)
    require(number < len(DTYPES), f"no dtype has the number {number}")
    dtype = DTYPES[number]
    num_dims = next(numbers)
    require(num_dims <= MAX_DIMS, f"a tensor has {num_dims} dimensions")
    shape = tuple(next(numbers) for _ in range(num_dims))
    num_weights = math.prod(shape)
    # A dimension of 0 may hide others of any size.
    require(math.prod(dim or 1 for dim in shape) <= MAX_WEIGHTS, f"a tensor has the shape {shape}")
    if kind is Kind.DENSE:
        sizes = tuple(next(numbers) for _ in range(dtype.itemsize))
        require_planes(sizes, num_weights)
        return Entry(name, kind, dtype, shape, sizes)

    require(dtype in FLOAT_DTYPES, f"a codebook of {dtype}")
    num_kept, num_codes, has_scales = next(numbers), next(numbers), next(numbers)
    require(num_kept <= num_weights, f"{num_kept} of {num_weights} weights are kept")
    require(num_codes <= min(num_kept, MAX_CODES), f"a codebook of {num_codes} values for {num_kept} weights")
    require(bool(num_kept) == bool(num_codes), f"a codebook of {num_codes} values for {num_kept} weights")
    require(has_scales <= bool(shape), "scales of a tensor without rows" if has_scales == 1 else "neither yes nor no")
    more: dict[str, Any] = {"num_kept": num_kept, "num_codes": num_codes}
    first, second = next(numbers), next(numbers)
    if kind is Kind.MIXED:
        row_size = num_weights // shape[0] if len(shape) > 1 and shape[0] else num_weights
        is_whole = 0 < first <= MAX_WEIGHTS and 0 < second <= MAX_WEIGHTS and row_size % (first * second) == 0
        require(is_whole, f"rows of {row_size} weights as kernels of {first} x {second}")
        more["kernel"] = (first, second)
    else:
        require(first in GAP_BITS if num_kept else first == 0, f"gaps of {first} bits")
        require(num_kept <= second <= num_weights, f"{second} entries for {num_kept} of {num_weights} weights")
        more["gap_bits"], more["num_entries"] = first, second
    sizes = tuple(next(numbers) for _ in range(3 + (dtype.itemsize if has_scales else 0)))
    if has_scales:
        require_planes(sizes[3:], shape[0])
    # Huffman codes take a bit at least, so `num_entries` is compared with the streams when they are read.
    if kind is Kind.MIXED and 0 < num_kept < num_weights:
        require(can_hold(sizes[0], num_weights), f"a mask of {num_weights} weights in {sizes[0]} bytes")
    if kind is Kind.MIXED and num_kept:
        require(can_hold(sizes[1], num_kept * num_bits(num_codes)), f"{num_kept} codes in {sizes[1]} bytes")
    return Entry(name, kind, dtype, shape, sizes, **more)
