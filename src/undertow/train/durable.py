"""Files that are there whole or not at all: written beside their place, brought to the disk, renamed into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from undertow.errors import FolderError


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` by what `write` writes; on any failure the old one stays as it was."""
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
        kept = "; what was there before is unharmed" if path.exists() else ""
        raise FolderError(f"{path} cannot be written: {error.strerror}{kept}") from None


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
