"""TensorBoard's event files, written without TensorBoard.

A file is a row of records: length (8 bytes), masked CRC of the length, payload, masked CRC of the payload (TFRecord). A
payload is an `Event` in protobuf's wire format (tensorflow/core/util/event.proto). Three events are written: the
version that opens a file, a scalar at a step, and a restart at a step, which makes TensorBoard forget later steps.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
MASK_DELTA = 0xA282EAD8  # added after a rotation by 15 bits, so that data may contain CRCs
FILE_VERSION = b"brain.Event:2"


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _make_table()


def masked_crc(data: bytes) -> int:
    """The CRC-32C of the data as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


class EventWriter:
    """Appends events to an open file; times are seconds since 1970."""

    def __init__(self, file: BinaryIO, time_s: float, restarted_at: int | None = None) -> None:
        self._file = file
        self._write(_double(1, time_s) + _bytes(3, FILE_VERSION))
        if restarted_at is not None:
            # SessionLog { status: START }: TensorBoard drops what was recorded from this step on.
            self._write(_double(1, time_s) + _number(2, restarted_at) + _bytes(7, _number(1, 1)))

    def add_scalar(self, tag: str, value: float, step: int, time_s: float) -> None:
        """One number of a curve."""
        item = _bytes(1, tag.encode()) + _float(2, value)  # Summary.Value { tag, simple_value }
        self._write(_double(1, time_s) + _number(2, step) + _bytes(5, _bytes(1, item)))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", masked_crc(length)))
        self._file.write(event + struct.pack("<I", masked_crc(event)))


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
