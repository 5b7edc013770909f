"""The file of a compressed network, `.utz`: written whole or not at all, read without trusting it.

In: tensors by name, coded or plain, and metadata. Out: a file whose bytes depend on nothing else; and a SmallFile that
lists it and decodes single tensors. Opening checks the version, the length, the sum over all bytes and every number of
the header, and what decoding would take; reading a tensor checks its streams and its own sum. Nothing is unpickled.
docs/small-file-format.md has the format, byte by byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from undertow.coding.entries import Entry, Kind
from undertow.coding.header import pack, unpack
from undertow.coding.payloads import Coder, decode_tensor, encode_tensor
from undertow.coding.tensors import CodedTensor
from undertow.durable import write_durably
from undertow.errors import CallError, DataError
from undertow.kernels.compiler import HAS_NUMBA

MAGIC = b"\x93UTZ"
VERSION = 1
_DIGEST_BYTES = 8
# More than this decoded is asked for by name: max_output_bytes.
DEFAULT_MAX_OUTPUT_BYTES = 16 << 30


def write_small_file(
    path: Path, tensors: Mapping[str, Tensor | CodedTensor], metadata: dict[str, Any], coder: Coder = "mixed"
) -> int:
    """Write the file; returns its bytes. A tensor that comes again under another name is stored once."""
    data = pack_small_file(tensors, metadata, coder)
    write_durably(path, lambda file: file.write(data))
    return len(data)


def pack_small_file(
    tensors: Mapping[str, Tensor | CodedTensor], metadata: dict[str, Any], coder: Coder = "mixed"
) -> bytes:
    """The bytes of the file."""
    _require_numba("write")
    entries: list[Entry] = []
    payloads = []
    first_names: dict[Any, str] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(_identity(tensor), name)
        if first != name:
            entries.append(Entry(name, Kind.ALIAS, tensor.dtype, tuple(tensor.shape), (), first))
            continue
        entry, payload = encode_tensor(name, tensor, coder)
        entries.append(entry)
        payloads.append(payload)
    content = b"".join([MAGIC, bytes([VERSION]), pack(entries, metadata), *payloads])
    return content + _digest(content)


class SmallFile:
    """An open file: what it lists, and its tensors one by one. `where` names it in errors."""

    def __init__(self, data: bytes, where: str, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES) -> None:
        """Check everything but the tensors themselves."""
        start = len(MAGIC) + 1
        if len(data) < start + _DIGEST_BYTES or data[: len(MAGIC)] != MAGIC:
            raise DataError(f"{where} is not a .utz file, or only its beginning")
        if data[len(MAGIC)] != VERSION:
            raise DataError(f"{where} has version {data[len(MAGIC)]} of the format; this Undertow reads {VERSION}")
        end = len(data) - _DIGEST_BYTES
        if _digest(memoryview(data)[:end]) != data[end:]:
            raise DataError(f"{where} is damaged or cut off: the sum over its {len(data)} bytes is another")
        _require_numba("read")
        entries, self.metadata = unpack(data, start, end, where)
        self.entries: dict[str, Entry] = {entry.name: entry for entry in entries}
        self.where = where
        self.num_bytes = len(data)
        self.output_bytes = sum(entry.num_bytes for entry in entries if entry.alias_of is None)
        if self.output_bytes > max_output_bytes:
            raise DataError(
                f"{where} claims {self.output_bytes} bytes of tensors in {len(data)} bytes, and max_output_bytes is "
                f"{max_output_bytes}"
            )
        self.data = data

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def read(self, name: str) -> Tensor | CodedTensor:
        """Decode one tensor, and nothing else. An alias gives what its target gives."""
        entry = self.entries.get(name)
        if entry is None:
            raise DataError(f"{self.where} has no tensor {name!r}")
        if entry.alias_of is not None:
            return self.read(entry.alias_of)
        payload = self.data[entry.offset : entry.offset + entry.payload_bytes]
        return decode_tensor(entry, payload, f"{self.where}: {name}")

    def read_all(self) -> dict[str, Tensor | CodedTensor]:
        """Decode every tensor; tied ones are the same object."""
        tensors: dict[str, Tensor | CodedTensor] = {}
        for name, entry in self.entries.items():
            tensors[name] = self.read(name) if entry.alias_of is None else tensors[entry.alias_of]
        return tensors


def open_small_file(path: Path, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES) -> SmallFile:
    """Open a file. Its tensors may take up to `max_output_bytes` when decoded, and about twice that in between."""
    try:
        with open(path, "rb") as file:
            data = file.read(len(MAGIC))
            # Another file may be of any size, and a device has no end.
            if data == MAGIC:
                data += file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return SmallFile(data, str(path), max_output_bytes)


def _identity(tensor: Tensor | CodedTensor) -> Any:
    """What two names of the same tensor have in common."""
    if isinstance(tensor, CodedTensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _require_numba(what: str) -> None:
    if not HAS_NUMBA:
        raise CallError(f"to {what} a .utz file Undertow needs Numba, which cannot be imported here: install numba")
