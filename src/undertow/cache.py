"""The folder in which what was measured, compiled or planned is kept for the next process.

platformdirs knows each system's convention; XDG_CACHE_HOME moves it on Linux.
"""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Undertow's folder among the user's caches; it need not exist yet."""
    return user_cache_path("undertow", appauthor=False)
