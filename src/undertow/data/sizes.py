"""Limits on the size that a file claims to have, checked before memory is allocated."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from undertow.errors import DataError

MAX_BYTES = 16 << 30  # of one array in memory

# The most that deflate can shrink: 258 bytes in two bits (RFC 1951, section 3.2.5: a length and a distance of one bit).
MAX_DEFLATE_RATIO = 1032


def file_bytes(path: Path | str) -> int:
    """The size of a file; raises DataError if there is none."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a file")
    return found.st_size


def check_claim(what: str, claimed_bytes: int, packed_bytes: int | None = None) -> None:
    """Raise DataError if a header claims more than is read, or more than `packed_bytes` of deflate can unpack to."""
    if claimed_bytes > MAX_BYTES:
        raise DataError(f"{what} claims {claimed_bytes:,} bytes; at most {MAX_BYTES:,} are read")
    if packed_bytes is not None and claimed_bytes > packed_bytes * MAX_DEFLATE_RATIO:
        raise DataError(f"{what} claims {claimed_bytes:,} bytes, more than its {packed_bytes:,} packed bytes can hold")
