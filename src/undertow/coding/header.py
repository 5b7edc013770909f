"""The header of a `.utz` file: entries and metadata in, bytes out, and back.

Numbers are written seven bits to a byte, the lowest first, the eighth bit set on all bytes but a number's last.
Numbers, names and metadata are coded together as text, since they repeat themselves; checksums are not. A reader takes
nothing for granted: every number is checked, and the text is bounded before it is decoded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from undertow.coding.entries import Entry, from_numbers, to_numbers
from undertow.coding.streams import decode_text, encode_text
from undertow.errors import CallError, DataError

MAX_METADATA_BYTES = 1 << 18
MAX_NAME_BYTES = 1 << 10
MAX_TEXT_BYTES = 1 << 20
_CHECKSUM_BYTES = 4


def write_number(number: int) -> bytes:
    """A number of any size, seven bits to a byte."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)


def read_numbers(data: bytes, at: int, where: str) -> Iterator[tuple[int, int]]:
    """The numbers of `data` from `at` on, each with the place after it."""
    while True:
        number = shift = 0
        while True:
            if at >= len(data):
                raise DataError(f"{where}: the header is damaged: it ends inside a number")
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 56:
                raise DataError(f"{where}: the header is damaged: a number has more than 63 bits")
        if byte == 0 and shift > 7:
            raise DataError(f"{where}: the header is damaged: a number is longer than it needs to be")
        yield number, at


def pack(entries: list[Entry], metadata: dict[str, Any]) -> bytes:
    """The header that lists `entries`."""
    described = json.dumps(
        metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
    if len(described) > MAX_METADATA_BYTES:
        raise CallError(f"metadata of {len(described)} bytes; a file holds at most {MAX_METADATA_BYTES}")
    names = [entry.name.encode() for entry in entries]
    for name in names:
        if not 0 < len(name) <= MAX_NAME_BYTES:
            raise CallError(f"a name of {len(name)} bytes; a tensor's has 1 to {MAX_NAME_BYTES}")
    indices = {entry.name: index for index, entry in enumerate(entries)}
    numbers = [len(entries)]
    for entry, name in zip(entries, names, strict=True):
        numbers += [len(name), *to_numbers(entry, indices)]
    text = b"".join([*map(write_number, numbers), *names, described])
    if len(text) > MAX_TEXT_BYTES:
        raise CallError(
            f"a header of {len(text)} bytes for {len(entries)} tensors; a file holds at most {MAX_TEXT_BYTES}"
        )
    coded = encode_text(text)
    checksums = [entry.checksum.to_bytes(_CHECKSUM_BYTES, "little") for entry in entries if entry.alias_of is None]
    return b"".join([write_number(len(text)), write_number(len(coded)), coded, *checksums])


def unpack(data: bytes, at: int, num_bytes: int, where: str) -> tuple[list[Entry], dict[str, Any]]:
    """The entries and the metadata of the header at `at`; payloads have to fill `data` up to `num_bytes`."""
    sizes = read_numbers(data, at, where)
    (text_bytes, _), (coded_bytes, at) = next(sizes), next(sizes)
    if text_bytes > MAX_TEXT_BYTES or coded_bytes > num_bytes - at:
        raise DataError(f"{where}: the header claims {text_bytes} bytes of text in {coded_bytes} bytes")
    text = decode_text(data[at : at + coded_bytes], text_bytes, where)
    at += coded_bytes
    entries, described = _read_text(text, where)
    for index, entry in enumerate(entries):
        if entry.alias_of is None:
            checksum = int.from_bytes(data[at : min(at + _CHECKSUM_BYTES, num_bytes)], "little")
            entries[index] = dataclasses.replace(entry, checksum=checksum)
            at += _CHECKSUM_BYTES
    for index, entry in enumerate(entries):
        entries[index] = dataclasses.replace(entry, offset=at)
        at += entry.payload_bytes
    if at != num_bytes:
        raise DataError(f"{where}: the header describes {at} bytes, and there are {num_bytes}")
    return entries, described


def _read_text(text: bytes, where: str) -> tuple[list[Entry], dict[str, Any]]:
    at = 0

    def numbers() -> Iterator[int]:
        nonlocal at
        for number, end in read_numbers(text, 0, where):
            at = end
            yield number

    source = numbers()
    num_entries = next(source)
    if num_entries > len(text):
        raise DataError(f"{where}: the header is damaged: {num_entries} tensors in {len(text)} bytes")
    entries: list[Entry] = []
    lengths = []
    for _ in range(num_entries):
        length = next(source)
        if not 0 < length <= MAX_NAME_BYTES:
            raise DataError(f"{where}: the header is damaged: a name of {length} bytes")
        lengths.append(length)
        entries.append(from_numbers(source, str(len(entries)), entries, where))
    names = []
    try:
        for length in lengths:
            names.append(text[at : at + length].decode())
            at += length
        # A constant such as NaN is no JSON.
        metadata = json.loads(text[at:].decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: the header's names and metadata cannot be read: {error}") from None
    if len(text) - at > MAX_METADATA_BYTES or not isinstance(metadata, dict):
        raise DataError(f"{where}: the metadata is no JSON object of at most {MAX_METADATA_BYTES} bytes")
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{where}: two tensors have the same name")
    for index, (entry, name) in enumerate(zip(entries, names, strict=True)):
        target = None if entry.alias_of is None else names[int(entry.alias_of)]
        entries[index] = dataclasses.replace(entry, name=name, alias_of=target)
    return entries, metadata


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
