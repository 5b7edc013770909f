"""Tensors in safetensors files (format: 8 bytes of header length, a JSON header, the tensors' bytes).

Files are written here, so that they can be streamed, synced and renamed. The safetensors library reads them, after the
header has been compared with the file. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from undertow.data.sizes import file_bytes
from undertow.durable import write_durably
from undertow.errors import DataError
from undertow.hashing import DTYPES, tensor_bytes

MAX_HEADER_BYTES = 100_000_000  # as in the library itself

PICKLE_STARTS = {b"PK\x03\x04": "a zip archive as torch.save writes it, with a pickle inside", b"\x80": "a pickle"}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. A tensor with two names is written twice, so that any reader finds both."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise DataError(f"{name} has elements of {tensor.dtype}, which safetensors cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))

    write_durably(path, write)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; raises DataError that says why a file is refused."""
    file_bytes(path)
    with open(path, "rb") as file:
        _check_header(path, file)
        # The library opens a file by its name, twice. This name is of the file that was checked, whatever replaces it.
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        try:
            with safe_open(opened if opened.exists() else path, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is not a dict
                return tensors, dict(content.metadata() or {})
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(f"{path} is refused: {error}") from None


def _check_header(path: Path, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    for magic, what in PICKLE_STARTS.items():
        # A length that is 128 more than a multiple of 256 starts with 0x80 too, but JSON follows it.
        if start.startswith(magic) and file.read(1) != b"{":
            raise DataError(f"{path} is {what}; only safetensors are read, since a pickle can run any code")
        file.seek(8)
    if len(start) < 8:
        raise DataError(f"{path} has {size} bytes, too few for a safetensors file")
    (length,) = struct.unpack("<Q", start)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise DataError(
            f"{path} is not a whole safetensors file: it claims a header of {length:,} bytes, but has {size:,}"
        )
    try:
        header = json.loads(file.read(length))
        ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise DataError(f"{path} is not a safetensors file: its header does not follow the format") from None
    if wanted != size:
        raise DataError(f"{path} is truncated or overlong: its header claims {wanted:,} bytes, it has {size:,}")
