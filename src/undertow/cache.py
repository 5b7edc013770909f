"""The folder in which what was measured, compiled or planned is kept for the next process.

platformdirs knows each system's convention; XDG_CACHE_HOME moves it on Linux.
"""

from __future__ import annotations

import contextlib
import os
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
