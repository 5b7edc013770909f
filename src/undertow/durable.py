"""Files that are there whole or not at all: each is written under another name, synced to the disk, and renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from undertow.errors import FolderError


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` by what `write` writes. If anything fails, the old file stays as it was."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with open(fresh, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        unharmed = "; what was there before is unharmed" if path.exists() else ""
        raise FolderError(f"{path} cannot be written: {error.strerror}{unharmed}") from None


def _sync_folder(folder: Path) -> None:
    """Sync a folder: a rename is on the disk only after its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
