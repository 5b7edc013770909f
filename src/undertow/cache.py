"""The folder that stores what was measured, compiled or planned for the next process.

platformdirs knows each system's convention; on Linux, XDG_CACHE_HOME moves the folder.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Undertow's folder among the user's caches; it need not exist yet."""
    return user_cache_path("undertow", appauthor=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a new file and rename it, so that a reader never sees half of one."""
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


@cache
def warn_of_no_cache(folder: Path, reason: str) -> None:
    """Warn that the folder cannot be written; once, however much could not be kept there."""
    warnings.warn(
        f"costs or plans could not be kept in the cache folder {folder} ({reason}): other processes measure and search "
        f"again; XDG_CACHE_HOME names another folder",
        stacklevel=3,
    )
